"""Log probabilities of tokens, taken before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from appliance.engine.types import PositionLogprobs, TokenLogprob


def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[PositionLogprobs, ...]:
    """For each row, the log probability and rank of its token, and of the `num_top` most likely ones.

    Args:
        logits: [rows, vocab], float32, finite.
        token_ids: one per row.
    """
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    rows = zip(token_ids, chosen.flatten().tolist(), ranks, ids.tolist(), values.tolist(), strict=True)
    return tuple(
        PositionLogprobs(
            TokenLogprob(token_id, logprob, rank),
            tuple(TokenLogprob(t, v, r) for r, (t, v) in enumerate(zip(top_ids, top, strict=True), start=1)),
        )
        for token_id, logprob, rank, top_ids, top in rows
    )
