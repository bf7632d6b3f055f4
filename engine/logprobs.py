"""Log probabilities of tokens, taken before any sampling parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.engine.types import PositionLogprobs, TokenLogprob


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of a token in each row and of the most likely ones, wherever the logits were.

    Attributes:
        token_ids, ranks: int64 [rows].
        logprobs: float64 [rows].
        top_ids, top_logprobs: [rows, num_top], best first.
    """

    token_ids: torch.Tensor
    ranks: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def read(self) -> tuple[PositionLogprobs, ...]:
        """For each row; waits for the device."""
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return tuple(
            PositionLogprobs(
                TokenLogprob(token_id, logprob, rank),
                tuple(
                    TokenLogprob(t, v, r) for r, (t, v) in enumerate(zip(top_ids, top, strict=True), start=1)
                ),
            )
            for token_id, logprob, rank, top_ids, top in zip(*(c.tolist() for c in columns), strict=True)
        )


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Scores:
    """For each row, the log probability and rank of its token, and of the `num_top` most likely ones.

    Args:
        logits: [rows, vocab], float32; where they are not finite, what is found means nothing.
        token_ids: int64 [rows].
    """
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]))
    return Scores(token_ids, ranks, chosen.squeeze(1), ids, values)
