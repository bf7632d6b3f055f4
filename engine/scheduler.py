"""`Scheduler`: decides what every step computes. Plans, and commits results; moves no bytes and imports no torch.

There are no phases: each sequence has `tokens` and `num_computed`, and a step gives it some of the deficit under a
token budget. Running sequences come first, then resumed ones, then waiting ones, each by priority and arrival. When
blocks run out, the running sequence with the lowest claim gives its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.engine.kv_cache import KVCache
from appliance.engine.types import ErrorInfo, PlanRow, Sequence, State, StepPlan, StepResult, TokenEvent


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of a sequence.

    Attributes:
        max_num_seqs: most sequences with rows in a step.
        max_num_batched_tokens: most tokens computed in a step; raised to `max_num_seqs` where it is less, so that
            every running sequence can have one.
        max_model_len: a sequence ends when it has this many tokens.
        eos_token_ids: ids that end a sequence unless it ignores them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    @property
    def token_budget(self) -> int:
        return max(self.max_num_batched_tokens, self.max_num_seqs)


class Scheduler:
    """Holds all living sequences and the KV cache they share."""

    def __init__(self, kv: KVCache, limits: SchedulerLimits) -> None:
        self.kv = kv
        self.limits = limits
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preemptions_total = 0
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. It must fit the pool when alone, which `max_model_len` sees to."""
        assert len(seq.tokens) < self.limits.max_model_len
        self._enqueue(seq)

    def find(self, request_id: str) -> Sequence | None:
        return next((seq for seq in self._living() if seq.id == request_id), None)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and free its blocks."""
        (self.running if seq.state is State.RUNNING else self.waiting).remove(seq)
        self._end(seq)

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and take the blocks they need.

        A row never takes the last token of the budget from a running sequence behind it: long prompts are computed
        in chunks beside everybody's next token.
        """
        rows: dict[str, PlanRow] = {}
        preempted: list[str] = []
        budget = self.limits.token_budget
        pending = sorted(self.running, key=lambda seq: seq.rank)
        while pending:
            seq = pending.pop(0)
            num_tokens = min(seq.deficit, budget - len(pending))
            while not self.kv.grow(seq, seq.num_computed + num_tokens):
                victim = max(self.running, key=lambda other: other.rank)
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is seq:
                    break
                pending.remove(victim)
            if seq.state is State.RUNNING:
                rows[seq.id] = self._row(seq, num_tokens)
                budget -= num_tokens
        if not preempted:
            self._admit(rows, budget)
        self._step_id += 1
        return StepPlan(self._step_id, tuple(rows.values()), preempted=tuple(preempted))

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed: advance, append ids, end what has ended."""
        events = []
        by_id = {seq.id: seq for seq in self.running}
        for index, (row, ids) in enumerate(zip(plan.rows, result.token_ids, strict=True)):
            seq = by_id[row.request_id]
            if index in result.failed:
                error = ErrorInfo("numerical_error", "the model computed a value that is not a number")
                events.append(self._event(seq, (), "error", error=error))
                self.kv.forget(seq)
                self.remove(seq)
                continue
            self.kv.advance(seq, row.n_tokens)
            if ids:
                events.append(self._append(seq, ids[0]))
        return events

    def check(self) -> None:
        """Assert that states, queues and block tables agree."""
        assert all(seq.state is State.RUNNING for seq in self.running)
        assert all(seq.state is State.WAITING and not any(seq.tables) for seq in self.waiting)
        assert len(self.running) <= self.limits.max_num_seqs
        self.kv.check(self._living())

    def _admit(self, rows: dict[str, PlanRow], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            # Room for each running sequence to grow by a block, so that admitting one does not preempt another.
            if not self.kv.admit(seq, spare=len(self.running)):
                break
            self.waiting.pop(0)
            if seq.num_preemptions == 0:
                seq.num_cached = seq.num_computed
            seq.state = State.RUNNING
            self.running.append(seq)
            num_tokens = min(seq.deficit, budget)
            rows[seq.id] = self._row(seq, num_tokens)
            budget -= num_tokens

    def _row(self, seq: Sequence, num_tokens: int) -> PlanRow:
        stop = seq.num_computed + num_tokens
        return PlanRow(
            request_id=seq.id,
            token_ids=tuple(seq.tokens[seq.num_computed : stop]),
            start=seq.num_computed,
            tables=tuple(tuple(table) for table in seq.tables),
            wants_logits=stop == len(seq.tokens),
            sampling=seq.request.sampling,
            seed=seq.seed,
        )

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.kv.release(seq)
        seq.num_preemptions += 1
        self.preemptions_total += 1
        self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        insort(self.waiting, seq, key=lambda other: (other.num_preemptions == 0, other.rank))

    def _append(self, seq: Sequence, token_id: int) -> TokenEvent:
        sampling = seq.request.sampling
        is_eos = token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            self.remove(seq)
            return self._event(seq, (), "stop", stop_token_id=token_id)
        seq.tokens.append(token_id)
        full = seq.num_generated == sampling.max_tokens or len(seq.tokens) == self.limits.max_model_len
        if full:
            self.remove(seq)
        return self._event(seq, (token_id,), "length" if full else None)

    def _event(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        finish_reason: str | None,
        stop_token_id: int | None = None,
        error: ErrorInfo | None = None,
    ) -> TokenEvent:
        return TokenEvent(
            request_id=seq.id,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=seq.num_cached,
            error=error,
        )

    def _end(self, seq: Sequence) -> None:
        if seq.tables:
            self.kv.release(seq)
        seq.state = State.FINISHED

    def _living(self) -> Iterable[Sequence]:
        return [*self.running, *self.waiting]
