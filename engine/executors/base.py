"""What the runner asks of an executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from appliance.engine.types import PlanRow

# Logits of a whole prompt would take gigabytes, and sampling several times as much: they are computed and used up in
# portions of this size.
LOGITS_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step says of its tokens, which are numbered in the order of the plan's rows.

    Attributes:
        finite: bool [tokens], whether a token's hidden state holds finite numbers alone.
        largest: integers [tokens that were asked about], the id of a token's largest logit (the first of equal ones);
            -1 where a logit is not a finite number. Both are wherever the executor computes, and may not be there yet.
    """

    finite: torch.Tensor
    largest: torch.Tensor


class Executor(Protocol):
    """Runs a step program over one model's weights and KV pools."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory as they are held here."""

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a KV group."""

    def attach_pools(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        """Allocate the pool of each KV group, and the rotary tables for the context that is served."""

    def run(self, rows: Sequence[PlanRow], greedy: Sequence[int]) -> StepOutput:
        """Compute a step of at least one row: writes its keys and values.

        Args:
            greedy: tokens whose largest logit is wanted.
        """

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 logits [len(tokens), vocab] of tokens of the last step."""

    def pool_bytes(self, group: int) -> torch.Tensor:
        """The pool of a KV group as bytes: the same memory as uint8 [num_blocks, block_bytes]."""


def largest_logits(executor: Executor, tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Of tokens of the last step, what `StepOutput.largest` says, from all their logits."""
    at_once = max(1, LOGITS_BYTES // (4 * vocab_size))
    found = []
    for start in range(0, len(tokens), at_once):
        logits = executor.logits(tokens[start : start + at_once])
        found.append(torch.where(logits.isfinite().all(dim=-1), logits.argmax(dim=-1), -1))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
