"""What sampling parameters do to logits before tokens are chosen: bias, penalties, bans.

A rule is a function of a row alone: token ids and a number for each. What it does to all rows of a batch is one
operation on the logits, wherever they are, and nothing waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from appliance.engine.types import PlanRow


def has_rules(row: PlanRow) -> bool:
    """Whether `apply_rules` may change anything."""
    sampling = row.sampling
    return bool(sampling.logit_bias or sampling.needs_context or row.forbidden)


def apply_rules(logits: torch.Tensor, rows: Sequence[PlanRow]) -> torch.Tensor:
    """Logits [rows, vocab] after bias, penalties and bans, in this order; `logits` itself is left as it is."""
    if not any(has_rules(row) for row in rows):
        return logits
    out = logits.clone()
    flat, vocab = out.view(-1), out.shape[1]
    for rule, change in _RULES:
        places: list[int] = []
        values: list[float] = []
        for index, row in enumerate(rows):
            found = rule(row)
            places += (index * vocab + token_id for token_id in found)
            values += found.values()
        if places:
            at = on_device(places, torch.int64, logits.device)
            flat[at] = change(flat[at], on_device(values, logits.dtype, logits.device))
    return out


def on_device(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of numbers, or of rows of them, on its way to the device: nothing waits until it is there."""
    made = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


def _biases(row: PlanRow) -> Mapping[int, float]:
    return row.sampling.logit_bias


def _repetitions(row: PlanRow) -> Mapping[int, float]:
    penalty = row.sampling.repetition_penalty
    return dict.fromkeys(row.context, penalty) if penalty != 1.0 else {}


def _divide_from_zero(values: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    return torch.where(values > 0, values / penalties, values * penalties)


def _uses(row: PlanRow) -> Mapping[int, float]:
    """OpenAI's presence and frequency penalties: of what was generated, not of the prompt."""
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    if not presence and not frequency:
        return {}
    counts = Counter(row.context[row.num_prompt :])
    return {token_id: presence + frequency * count for token_id, count in counts.items()}


def _copies(row: PlanRow) -> Mapping[int, float]:
    """DRY (p-e-w 2024, oobabooga/text-generation-webui pull request 5677), without sequence breakers."""
    sampling = row.sampling
    if not sampling.dry_multiplier:
        return {}
    excess = {
        token_id: length - sampling.dry_allowed_length
        for token_id, length in _continued_repetitions(row.context).items()
        if length >= sampling.dry_allowed_length
    }
    # A tensor's power becomes infinite where Python's would raise, after a thousand repeated tokens or so.
    power = sampling.dry_base ** torch.tensor(list(excess.values()), dtype=torch.float64)
    return dict(zip(excess, (sampling.dry_multiplier * power).tolist(), strict=True))


def _bans(row: PlanRow) -> Mapping[int, float]:
    banned = dict.fromkeys(row.forbidden, float("-inf"))
    for sequence in row.bad_sequences:
        if sequence[:-1] == row.context[len(row.context) - len(sequence) + 1 :]:
            banned[sequence[-1]] = float("-inf")
    return banned


def _replace(_values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return others


_RULES: tuple[
    tuple[Callable[[PlanRow], Mapping[int, float]], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]],
    ...,
] = (
    (_biases, torch.add),
    (_repetitions, _divide_from_zero),
    (_uses, torch.sub),
    (_copies, torch.sub),
    (_bans, _replace),
)


def _continued_repetitions(context: Sequence[int]) -> dict[int, int]:
    """For each token that followed an earlier occurrence of how the context ends: the longest such ending."""
    backwards = context[::-1]
    lengths: dict[int, int] = {}
    for shift, length in enumerate(_common_prefixes(backwards)):
        if shift > 0 and length > 0:
            follower = backwards[shift - 1]
            lengths[follower] = max(lengths.get(follower, 0), length)
    return lengths


def _common_prefixes(items: Sequence[int]) -> list[int]:
    """For each i, how long `items[i:]` agrees with `items` (the Z-algorithm, linear time; Gusfield 1997)."""
    z = [0] * len(items)
    left = right = 0
    for i in range(1, len(items)):
        if i < right:
            z[i] = min(right - i, z[i - left])
        while i + z[i] < len(items) and items[z[i]] == items[i + z[i]]:
            z[i] += 1
        if i + z[i] > right:
            left, right = i, i + z[i]
    return z
