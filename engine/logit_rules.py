"""What sampling parameters do to the logits of a row before a token is chosen: bias, penalties, bans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from appliance.engine.types import PlanRow


def has_rules(row: PlanRow) -> bool:
    """Whether `apply_rules` may change anything."""
    sampling = row.sampling
    return bool(sampling.logit_bias or sampling.needs_context or row.forbidden)


def apply_rules(logits: torch.Tensor, row: PlanRow) -> torch.Tensor:
    """Logits [vocab] after bias, penalties and bans, in this order; `logits` itself is left as it is."""
    sampling = row.sampling
    if not has_rules(row):
        return logits
    out = logits.clone()
    for token_id, bias in sampling.logit_bias.items():
        out[token_id] += bias
    if sampling.needs_context:
        _penalise_repetition(out, row)
        _penalise_use(out, row)
        if sampling.dry_multiplier > 0:
            _penalise_copying(out, row)
        for sequence in row.bad_sequences:
            if sequence[:-1] == row.context[len(row.context) - len(sequence) + 1 :]:
                out[sequence[-1]] = float("-inf")
    if row.forbidden:
        out[list(row.forbidden)] = float("-inf")
    return out


def _penalise_repetition(logits: torch.Tensor, row: PlanRow) -> None:
    penalty = row.sampling.repetition_penalty
    if penalty != 1.0:
        seen = torch.tensor(sorted(set(row.context)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _penalise_use(logits: torch.Tensor, row: PlanRow) -> None:
    """OpenAI's presence and frequency penalties: of what was generated, not of the prompt."""
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    used = Counter(row.context[row.num_prompt :])
    if used and (presence or frequency):
        counts = torch.tensor(list(used.values()), dtype=logits.dtype)
        logits[torch.tensor(list(used))] -= presence + frequency * counts


def _penalise_copying(logits: torch.Tensor, row: PlanRow) -> None:
    """DRY (p-e-w 2024, oobabooga/text-generation-webui pull request 5677), without sequence breakers."""
    sampling = row.sampling
    lengths = {
        token_id: length - sampling.dry_allowed_length
        for token_id, length in _continued_repetitions(row.context).items()
        if length >= sampling.dry_allowed_length
    }
    if lengths:
        # A tensor's power becomes infinite where Python's would raise, after a thousand repeated tokens or so.
        power = sampling.dry_base ** torch.tensor(list(lengths.values()), dtype=torch.float64)
        logits[torch.tensor(list(lengths))] -= (sampling.dry_multiplier * power).to(logits.dtype)


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
