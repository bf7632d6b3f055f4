"""`Runner`: runs step plans on an executor. Everything is on its way to the device before anything of it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from appliance.engine.executors import LOGITS_BYTES, Executor
from appliance.engine.logprobs import Scores, score
from appliance.engine.sampler import is_greedy, sample
from appliance.engine.types import BlockCopy, PlanRow, PositionLogprobs, RowResult, StepPlan, StepResult


class Runner:
    """Executes plans: copies blocks, runs the program, scores and samples."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._rows_at_once = max(1, LOGITS_BYTES // (4 * vocab_size))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan."""
        self._copy(plan.copies)
        rows = plan.rows
        if not rows:
            return StepResult(())
        starts = list(accumulate((row.n_tokens for row in rows), initial=0))
        last = [stop - 1 for stop in starts[1:]]
        asked = [index for index, row in enumerate(rows) if row.wants_logits]
        greedy = [index for index in asked if is_greedy(rows[index])]
        drawn = [index for index in asked if not is_greedy(rows[index])]
        output = self._executor.run(rows, [last[index] for index in greedy])
        choices = [
            _choose(rows, some, logits)
            for some, logits in self._logits(drawn, [last[index] for index in drawn])
        ]
        finite = output.finite.tolist()
        results = [RowResult(failed=not all(finite[a:b])) for a, b in pairwise(starts)]
        for index, token_id in zip(greedy, output.largest.tolist(), strict=True):
            ids = (max(token_id, 0),) * len(rows[index].seeds)
            results[index] = RowResult(ids, failed=results[index].failed or token_id < 0)
        for choice in choices:
            for index, result in choice.read():
                results[index] = replace(result, failed=results[index].failed or result.failed)
        for index, row in enumerate(rows):
            if row.targets and not results[index].failed:
                results[index] = self._scored(results[index], row, starts[index] + row.score_offset)
        return StepResult(tuple(results))

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks inside the device's pools, one after the other in the order given."""
        for copy in copies:
            pool = self._executor.pool_bytes(copy.source.group)
            pool[copy.target.id] = pool[copy.source.id]

    def _logits(
        self, items: Sequence[int], tokens: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """Logits [items, vocab] of a token of the step for each item, never more than `LOGITS_BYTES` at once."""
        for start in range(0, len(tokens), self._rows_at_once):
            some = slice(start, start + self._rows_at_once)
            yield items[some], self._executor.logits(tokens[some])

    def _scored(self, result: RowResult, row: PlanRow, first: int) -> RowResult:
        """`result` with the log probabilities of the row's targets, whose logits begin with those of token `first`."""
        tokens = range(first, first + len(row.targets))
        scored: list[PositionLogprobs] = []
        failed = result.failed
        for targets, logits in self._logits(row.targets, tokens):
            failed = failed or not bool(logits.isfinite().all())
            ids = torch.tensor(targets, device=logits.device).unsqueeze(1)
            count = row.sampling.prompt_logprobs or 0
            # One row after the other: in float64, all of them would take several times the logits' own memory.
            found = [score(*each, count) for each in zip(logits.unsqueeze(1), ids, strict=True)]
            scored += (position for each in found for position in each.read())
        return replace(result, prompt_logprobs=tuple(scored), failed=failed)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Tokens chosen for some rows of a plan, on the device.

    Attributes:
        counts: ids of each row.
        scores: of the ids of a row, by its place here.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    ids: torch.Tensor
    finite: torch.Tensor
    scores: dict[int, Scores]

    def read(self) -> Iterator[tuple[int, RowResult]]:
        """For each row its number and result; waits for the device."""
        ids, finite = self.ids.tolist(), self.finite.tolist()
        stops = accumulate(self.counts)
        for place, (row, count, stop) in enumerate(zip(self.rows, self.counts, stops, strict=True)):
            logprobs = self.scores[place].read() if place in self.scores else ()
            yield row, RowResult(tuple(ids[stop - count : stop]), logprobs, failed=not finite[place])


def _choose(rows: Sequence[PlanRow], indices: Sequence[int], logits: torch.Tensor) -> _Choice:
    """Sample the rows `indices` of a plan, whose logits these are; nothing waits."""
    chosen = [rows[index] for index in indices]
    ids, finite = sample(logits, chosen)
    counts = [len(row.seeds) for row in chosen]
    scores = {
        place: score(logits[place].expand(len(own), -1), own, row.sampling.logprobs)
        for place, (row, own) in enumerate(zip(chosen, torch.split(ids, counts), strict=True))
        if row.sampling.logprobs is not None
    }
    return _Choice(indices, counts, ids, finite, scores)
