"""`Watch`: what must hold of every step, whatever the traffic.

Bounded wait, as the rules are now. Let L be the longest sequence. In any L steps with work, some sequence ends or one
with a better claim than all that run is admitted: until then the best claim that runs is never a victim (alone it fits
the pool), and advances by a token in every step. Sequences are admitted in the order of the queue: preempted ones, then
new ones, each by claim. So who waits behind k others waits at most L steps for each of these, and for each better claim
that arrives meanwhile; nobody ages, so an endless stream of better claims is waited for endlessly. Steered sequences,
which hold blocks while their client thinks, are exempt: the bound then only holds of the steps in which none of them
does.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.engine.blocks import most_blocks
from appliance.engine.scheduler import Scheduler
from appliance.engine.types import HOLE, Sequence, State, StepPlan
from sim.memory import WatchedCache
from sim.traffic import Settings


@dataclass(slots=True)
class Figures:
    """What a simulation measured; of several, `add` makes one.

    Attributes:
        fruitless: preemptions of a sequence that has produced nothing since it was preempted before.
        held_tokens, wasted_tokens: places of blocks in groups without a window, summed over sequences and steps, and
            those of them that no token of their sequence has.
        chained_copies: those from a block that is a target of the same plan.
        longest_wait: most steps that a sequence was in the queue at a time.
        longest_standstill: most of the steps that the bound of the wait allows between ends, as a share.
        most_available: the largest share of a pool that was available when it had too little for a sequence's growth.
    """

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    copies: int = 0
    chained_copies: int = 0
    preemptions: int = 0
    fruitless: int = 0
    failures: int = 0
    cancels: int = 0
    steerings: int = 0
    sequence_steps: int = 0
    sequence_tokens: int = 0
    held_tokens: int = 0
    wasted_tokens: int = 0
    longest_wait: int = 0
    longest_standstill: float = 0.0
    most_available: float = 0.0

    def add(self, other: Figures) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            is_extreme = name.startswith(("longest", "most"))
            setattr(self, name, max(mine, theirs) if is_extreme else mine + theirs)

    @property
    def mean_tokens(self) -> float:
        return self.sequence_tokens / max(1, self.sequence_steps)

    @property
    def waste(self) -> float:
        return self.wasted_tokens / max(1, self.held_tokens)


class Watch:
    """Looks at the scheduler before and after each plan."""

    def __init__(self, scheduler: Scheduler, settings: Settings, figures: Figures) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._figures = figures
        self._since_turn = 0
        self._living: set[Sequence] = set()
        self._queued_at: dict[Sequence, int] = {}
        # Preempted, and no token computed since; preempted, with as many tokens as it had then.
        self._idle: set[Sequence] = set()
        self._tokens_when_preempted: dict[Sequence, int] = {}

    def check(self) -> None:
        """Assert the invariants that hold between any two actions."""
        scheduler = self._scheduler
        scheduler.check()
        for group, pool in enumerate(scheduler.kv.pools):
            held = {id for seq in scheduler.running for id in seq.tables[group]} - {HOLE}
            assert len(held) + pool.num_cached + pool.num_free == pool.num_blocks, (
                f"group {group} lost blocks"
            )
        for seq in scheduler.waiting:
            assert seq.num_computed == 0, f"{seq.key} waits and claims {seq.num_computed} computed tokens"

        self._living.update(scheduler.running, scheduler.waiting)
        for seq in [seq for seq in self._living if seq.state is State.FINISHED]:
            self._since_turn = 0
            self._living.remove(seq)
            self._idle.discard(seq)
            self._queued_at.pop(seq, None)
            self._tokens_when_preempted.pop(seq, None)

    def check_empty(self) -> None:
        """Assert that nothing is left when nobody lives."""
        scheduler = self._scheduler
        assert not scheduler.has_work
        assert [pool.num_used for pool in scheduler.kv.pools] == [0] * len(scheduler.kv.pools)

    def before(self) -> None:
        """Remember what a plan is to be held against."""
        scheduler = self._scheduler
        self._running = list(scheduler.running)
        self._wanting = [seq for seq in self._running if seq.deficit]
        self._had_work = bool(self._wanting or scheduler.waiting)
        self._preemptions = {seq: seq.num_preemptions for seq in self._running}
        assert isinstance(scheduler.kv, WatchedCache)
        self._refusals = scheduler.kv.num_refusals

    def after(self, plan: StepPlan) -> None:
        """Assert what holds of a plan."""
        scheduler, limits = self._scheduler, self._settings.limits
        assert plan.n_tokens <= limits.token_budget
        assert len(plan.rows) <= limits.max_num_seqs
        assert all(row.n_tokens > 0 for row in plan.rows)
        assert len({(row.request_id, row.index) for row in plan.rows}) == len(plan.rows), "a row twice"
        assert plan.rows or not self._had_work, "work is waiting and nothing runs"
        by_key = {seq.key: seq for seq in scheduler.running}
        rows = [by_key[row.request_id, row.index] for row in plan.rows]
        preempted = [seq for seq, count in self._preemptions.items() if seq.num_preemptions != count]
        admitted = [seq for seq in rows if seq not in self._preemptions or seq in preempted]
        self._check_preempted(plan, rows, preempted, admitted)
        self._check_admitted(plan, admitted)
        self._check_turn(rows, admitted)
        self._check_held()
        self._note_waits(admitted)

    def computed(self, plan: StepPlan) -> None:
        """The rows of a plan were computed."""
        by_key = {seq.key: seq for seq in self._scheduler.running}
        self._idle -= {by_key[row.request_id, row.index] for row in plan.rows}

    def _check_preempted(
        self, plan: StepPlan, rows: list[Sequence], preempted: list[Sequence], admitted: list[Sequence]
    ) -> None:
        kv, figures = self._scheduler.kv, self._figures
        assert isinstance(kv, WatchedCache)
        assert len(plan.preempted) == kv.num_refusals - self._refusals, (
            "preempted though the pool was not full"
        )
        figures.most_available = max(figures.most_available, kv.most_available_at_refusal)
        if len(preempted) > len(plan.preempted):
            assert set(rows) <= set(admitted), "those that wait for a choice gave way to nobody in need"
        elif preempted:
            best = min(seq.rank for seq in preempted)
            staying = [seq for seq in self._running if seq not in preempted]
            assert all(seq.rank < best for seq in staying), "a better claim gave way"
            assert not admitted, "others were admitted in place of those that gave way"
        for seq in preempted:
            assert seq not in self._idle, f"{seq.key} was preempted again before it computed anything"
            self._idle.add(seq)
            figures.fruitless += self._tokens_when_preempted.get(seq) == len(seq.tokens)
            self._tokens_when_preempted[seq] = len(seq.tokens)
        figures.preemptions += len(preempted)

    def _check_admitted(self, plan: StepPlan, admitted: list[Sequence]) -> None:
        scheduler, limits = self._scheduler, self._settings.limits
        available = [pool.num_available for pool in scheduler.kv.pools]
        # Each that ran before the last one was admitted can grow by a block.
        assert not admitted or min(available) >= len(scheduler.running) - 1, f"{available} blocks are left"
        if not scheduler.waiting:
            return
        head = min(scheduler.waiting, key=_turn)
        assert all(_turn(seq) < _turn(head) for seq in admitted), f"{head.key} was overtaken in the queue"
        is_full = len(plan.rows) == limits.max_num_seqs or plan.n_tokens == limits.token_budget
        if not (is_full or plan.preempted):
            wanted = [
                self._most_needed(head, window) + len(scheduler.running) for window in scheduler.kv.windows
            ]
            assert any(need > have for need, have in zip(wanted, available, strict=True)), (
                f"{head.key} is kept waiting for {wanted} blocks while {available} are available"
            )

    def _most_needed(self, seq: Sequence, window: int) -> int:
        """The most blocks that a sequence needs in a group when it is admitted."""
        size, whole = self._settings.block_size, -(-len(seq.tokens) // self._settings.block_size)
        chunk = self._settings.limits.token_budget
        return min(whole, most_blocks(window - 1 + chunk, size)) if window else whole

    def _check_turn(self, rows: list[Sequence], admitted: list[Sequence]) -> None:
        idle = len(self._running) - len(self._wanting)
        if self._wanting and not idle:
            best = min(self._wanting, key=lambda seq: seq.rank)
            assert best in rows, f"{best.key}, the best claim that runs, does not advance"
        overtakes = any(all(seq.rank < other.rank for other in self._running) for seq in admitted)
        if idle or overtakes or not self._had_work:
            self._since_turn = 0
            return
        self._since_turn += 1
        longest = self._settings.limits.max_model_len
        assert self._since_turn <= longest, f"nobody ended in {self._since_turn} steps"
        self._figures.longest_standstill = max(self._figures.longest_standstill, self._since_turn / longest)

    def _check_held(self) -> None:
        figures, size = self._figures, self._settings.block_size
        for seq in self._scheduler.running:
            for window, table in zip(self._settings.windows, seq.tables, strict=True):
                if window:
                    held = sum(block_id != HOLE for block_id in table)
                    most = self._most_needed(seq, window)
                    assert held <= most, (
                        f"{seq.key} holds {held} blocks of a window of {window}, at most {most}"
                    )
                    continue
                wasted = len(table) * size - len(seq.tokens)
                assert wasted < size, f"{seq.key} has {len(table)} blocks for {len(seq.tokens)} tokens"
                figures.held_tokens += len(table) * size
                figures.wasted_tokens += max(0, wasted)
            figures.sequence_steps += 1
            figures.sequence_tokens += len(seq.tokens)

    def _note_waits(self, admitted: list[Sequence]) -> None:
        figures = self._figures
        for seq in self._scheduler.waiting:
            self._queued_at.setdefault(seq, figures.steps)
        for seq in admitted:
            waited = figures.steps - self._queued_at.pop(seq, figures.steps)
            figures.longest_wait = max(figures.longest_wait, waited)


def _turn(seq: Sequence) -> tuple[bool, tuple[int, float, str, int]]:
    """The order of the queue."""
    return (seq.num_preemptions == 0, seq.rank)
