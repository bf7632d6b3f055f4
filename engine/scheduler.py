"""`Scheduler`: decides what every step computes. Plans, and commits results; moves no bytes and imports no torch.

There are no phases: each sequence has `tokens` and `num_computed`, and a step gives it some of the deficit under a
token budget. Running sequences come first, then resumed ones, then waiting ones, each by priority and arrival. When
blocks run out, the running sequence with the lowest claim gives its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from appliance.engine.kv_cache import KVCache
from appliance.engine.rows import plan_row
from appliance.engine.seeds import derive_seed
from appliance.engine.types import (
    BlockCopy,
    ErrorInfo,
    PlanRow,
    RowResult,
    Sequence,
    State,
    StepPlan,
    StepResult,
    TokenEvent,
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of a sequence.

    Attributes:
        max_num_seqs: most sequences with rows in a step.
        token_budget: most tokens computed in a step; at least `max_num_seqs`, so that every running sequence can have
            one.
        max_model_len: a sequence ends when it has this many tokens.
        eos_token_ids: ids that end a sequence unless it ignores them.
    """

    max_num_seqs: int
    token_budget: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Scheduler:
    """Holds all living sequences and the KV cache they share."""

    def __init__(self, kv: KVCache, limits: SchedulerLimits) -> None:
        self.kv = kv
        self.limits = limits
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        # Steered sequences without blocks that have said what may follow them; they wait to be told, not to run.
        self._parked: list[Sequence] = []
        self._by_request: dict[str, list[Sequence]] = {}
        self.preemptions_total = 0
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. It must fit the pool when alone, which `max_model_len` sees to."""
        assert len(seq.tokens) < self.limits.max_model_len
        self._by_request.setdefault(seq.request.id, []).append(seq)
        self._enqueue(seq)

    def find(self, request_id: str) -> list[Sequence]:
        """The living sequences of a request."""
        return list(self._by_request.get(request_id, ()))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and free its blocks."""
        places = (self.running, self._parked, self.waiting)
        next(place for place in places if seq in place).remove(seq)
        if seq.tables:
            self.kv.release(seq)
        seq.state = State.FINISHED
        siblings = self._by_request[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.id]

    def plan(self) -> StepPlan:
        """Choose the rows of the next step and take the blocks they need.

        A row never takes the last token of the budget from a running sequence behind it: long prompts are computed
        in chunks beside everybody's next token.
        """
        rows: list[PlanRow] = []
        copies: list[BlockCopy] = []
        preempted: list[str] = []
        budget = self.limits.token_budget
        # A steered sequence has no deficit until it is told how to go on.
        pending = sorted((seq for seq in self.running if seq.deficit), key=lambda seq: seq.rank)
        pending = pending[: self.limits.max_num_seqs]
        while pending:
            seq = pending.pop(0)
            num_tokens = min(seq.deficit, budget - len(pending))
            while (needed := self.kv.grow(seq, seq.num_computed + num_tokens)) is None:
                victim = max(self.running, key=lambda other: other.rank)
                self._preempt(victim)
                preempted.append(victim.request.id)
                if victim is seq:
                    break
                if victim in pending:
                    pending.remove(victim)
            if needed is not None:
                copies += needed
                rows.append(plan_row(seq, num_tokens, self.limits.eos_token_ids))
                budget -= num_tokens
        if not preempted:
            self._admit(rows, budget)
        if not rows:
            # What is held back by sequences that wait to be told how to go on.
            for seq in list(self.running):
                self._preempt(seq)
            self._admit(rows, budget)
        self._step_id += 1
        return StepPlan(self._step_id, tuple(rows), tuple(copies), tuple(preempted))

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what a step computed: advance, append ids, fork, end what has ended."""
        events = []
        by_key = {seq.key: seq for seq in self.running}
        for row, computed in zip(plan.rows, result.rows, strict=True):
            seq = by_key[row.request_id, row.index]
            if seq.state is State.FINISHED:  # a row before this one failed, and with it the request
                continue
            if computed.failed:
                error = ErrorInfo("numerical_error", "the model computed a value that is not a number")
                events.append(self.fail(seq.request.id, error))
                continue
            self.kv.advance(seq, row.n_tokens)
            seq.num_scored += len(computed.prompt_logprobs)
            events += self._take_in(seq, computed)
        return events

    def steer(self, request_id: str, choices: list[tuple[int, int]]) -> list[int]:
        """Go on with these (index, next id) pairs of a steered request; continuations that are not named end silently.

        Returns:
            For each pair, the index of the continuation that it became: the first of a parent is the parent itself.
        """
        by_index = {seq.index: seq for seq in self.find(request_id)}
        next_index = max(by_index) + 1
        children: list[Sequence] = []
        for index, _ in choices:
            parent = by_index[index]
            if parent in children:
                children.append(self._fork(parent, next_index))
                next_index += 1
            else:
                children.append(parent)
        for seq in by_index.values():
            if seq not in children:
                self.remove(seq)
        for child, (_, token_id) in zip(children, choices, strict=True):
            child.tokens.append(token_id)
            if child in self._parked:
                self._parked.remove(child)
                self._enqueue(child)
        return [child.index for child in children]

    def end(self, seq: Sequence, reason: str) -> TokenEvent:
        """End one continuation."""
        self.remove(seq)
        return self._event(seq, finish_reason=reason)

    def fail(self, request_id: str, error: ErrorInfo) -> TokenEvent:
        """End a living request with an error; what its blocks hold is not to be trusted."""
        for seq in self.find(request_id):
            self.kv.forget(seq)
            self.remove(seq)
        return TokenEvent(request_id=request_id, finish_reason="error", is_last=True, error=error)

    def check(self) -> None:
        """Assert that states, queues and block tables agree."""
        assert all(seq.state is State.RUNNING for seq in self.running)
        assert all(seq.state is State.WAITING and not any(seq.tables) for seq in self.waiting)
        assert sum(not seq.request.is_steered for seq in self.running) <= self.limits.max_num_seqs
        living = [*self.running, *self.waiting, *self._parked]
        assert sorted(map(id, living)) == sorted(id(s) for each in self._by_request.values() for s in each)
        self.kv.check(living)

    def _admit(self, rows: list[PlanRow], budget: int) -> None:
        while self.waiting and budget > 0 and len(rows) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            # Room for each running sequence to grow by a block, so that admitting one does not preempt another.
            if not self.kv.admit(seq, spare=len(self.running), chunk=self.limits.token_budget):
                break
            self.waiting.pop(0)
            if seq.num_preemptions == 0:
                seq.num_cached = seq.num_computed
            seq.state = State.RUNNING
            self.running.append(seq)
            num_tokens = min(seq.deficit, budget)
            rows.append(plan_row(seq, num_tokens, self.limits.eos_token_ids))
            budget -= num_tokens

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        has_said = seq.deficit == 0
        self.kv.release(seq)
        seq.num_preemptions += 1
        self.preemptions_total += 1
        if has_said:
            seq.state = State.WAITING
            self._parked.append(seq)
        else:
            self._enqueue(seq)

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        insort(self.waiting, seq, key=lambda other: (other.num_preemptions == 0, other.rank))

    def _take_in(self, seq: Sequence, computed: RowResult) -> list[TokenEvent]:
        """The events of a row: each id goes to a continuation of its own, the first one to `seq`."""
        if seq.request.is_steered:
            return [self._event(seq, RowResult(logprobs=computed.logprobs))] if computed.logprobs else []
        if computed.token_ids:
            continuations = [seq, *(self._fork(seq, index) for index in range(1, len(computed.token_ids)))]
            return [self._append(each, computed, place) for place, each in enumerate(continuations)]
        if seq.deficit == 0:  # nothing was to be generated
            forks = [self._fork(seq, index) for index in range(1, seq.request.sampling.num_sequences)]
            self.remove(seq)
            return [self._event(seq, computed, "length"), *(self.end(fork, "length") for fork in forks)]
        return [self._event(seq, computed)] if computed.prompt_logprobs else []

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Another continuation of the same prompt; it waits, to be computed again, where no more may run."""
        child = Sequence(
            parent.request,
            list(parent.tokens),
            derive_seed(parent.seed, index),
            block_hashes=list(parent.block_hashes),
            index=index,
            num_cached=parent.num_cached,
            num_scored=parent.num_scored,
        )
        self._by_request[parent.request.id].append(child)
        has_room = parent.request.is_steered or len(self.running) < self.limits.max_num_seqs
        if parent.state is State.RUNNING and has_room:
            self.kv.fork(parent, child)
            child.state = State.RUNNING
            self.running.append(child)
        else:
            child.num_preemptions = 1
            self._enqueue(child)
        return child

    def _append(self, seq: Sequence, computed: RowResult, place: int) -> TokenEvent:
        """Give a continuation the id at `place`; the prompt's log probabilities go with the first one."""
        token_id = computed.token_ids[place]
        prompt_logprobs = computed.prompt_logprobs if place == 0 else ()
        sampling = seq.request.sampling
        is_eos = token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            self.remove(seq)
            return self._event(seq, RowResult(prompt_logprobs=prompt_logprobs), "stop", token_id)
        seq.tokens.append(token_id)
        full = seq.num_generated == sampling.max_tokens or len(seq.tokens) == self.limits.max_model_len
        if full:
            self.remove(seq)
        news = RowResult((token_id,), computed.logprobs[place : place + 1], prompt_logprobs)
        return self._event(seq, news, "length" if full else None)

    def _event(
        self,
        seq: Sequence,
        news: RowResult | None = None,
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
    ) -> TokenEvent:
        news = news or RowResult()
        return TokenEvent(
            request_id=seq.request.id,
            index=seq.index,
            token_ids=news.token_ids,
            logprobs=news.logprobs,
            prompt_logprobs=news.prompt_logprobs,
            finish_reason=finish_reason,
            is_last=finish_reason is not None and not self.find(seq.request.id),
            stop_token_id=stop_token_id,
            num_cached_tokens=seq.num_cached,
        )
