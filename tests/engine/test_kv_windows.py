"""KV groups with windows: what is held, found and given back, against brute force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Many

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_model import EOS, VOCAB, make_sequence, next_token, requests, undisturbed

from appliance.engine.blocks import BlockPool, chain_hash
from appliance.engine.kv_cache import KVCache
from appliance.engine.scheduler import Scheduler, SchedulerLimits
from appliance.engine.types import HOLE, RowResult, Sequence, StepPlan, StepResult

BLOCK = 4
BUDGET = 8
SALT = b"x" * 32
Windows = tuple[int, ...]

windows = st.lists(st.sampled_from([0, 1, 2, 4, 5, 8, 9, 40]), min_size=1, max_size=3).map(tuple)


def spanned(window: int, context_blocks: int) -> int:
    """The most blocks of which a step of `BUDGET` tokens sees or writes anything, found by trying every start."""
    if not window:
        return context_blocks
    return max(
        len(
            {
                at // BLOCK
                for at in range(max(0, start - window + 1), min(start + BUDGET, context_blocks * BLOCK))
            }
        )
        for start in range(context_blocks * BLOCK)
    )


class GroupMemory:
    """Runs plans over a memory of token ids for each group, and looks at all that each token sees through its table."""

    def __init__(self, windows: Windows, sizes: Many[int]) -> None:
        self.windows = windows
        self.memory = [[[-1] * BLOCK for _ in range(size)] for size in sizes]

    def run(self, plan: StepPlan, living: dict[tuple[str, int], Sequence]) -> StepResult:
        for copy in plan.copies:
            memory = self.memory[copy.target.group]
            memory[copy.target.id] = list(memory[copy.source.id])
        for row in plan.rows:
            for memory, table in zip(self.memory, row.tables, strict=True):
                for position, token in enumerate(row.token_ids, row.start):
                    memory[table[position // BLOCK]][position % BLOCK] = token
        results = []
        for row in plan.rows:
            tokens = living[row.request_id, row.index].tokens[: row.start + row.n_tokens]
            for window, memory, table in zip(self.windows, self.memory, row.tables, strict=True):
                for position in range(row.start, len(tokens)):
                    seen = range(max(0, position - window + 1) if window else 0, position + 1)
                    assert all(table[at // BLOCK] != HOLE for at in seen)
                    assert [memory[table[at // BLOCK]][at % BLOCK] for at in seen] == [
                        tokens[at] for at in seen
                    ]
            results.append(RowResult(tuple(next_token(tokens, seed) for seed in row.seeds)))
        return StepResult(tuple(results))


def make_scheduler(windows: Windows, sizes: Many[int], *, caching: bool) -> Scheduler:
    limits = SchedulerLimits(4, BUDGET, _context(windows, sizes), frozenset({EOS}))
    pools = tuple(BlockPool(size, caching=caching) for size in sizes)
    return Scheduler(KVCache(pools, BLOCK, windows, salt=SALT), limits)


def _context(windows: Windows, sizes: Many[int]) -> int:
    """The longest context that fits alone."""
    blocks = range(1, 15)
    fitting = [
        n for n in blocks if all(spanned(w, n) <= size for w, size in zip(windows, sizes, strict=True))
    ]
    return max(fitting) * BLOCK


def check_held(scheduler: Scheduler) -> None:
    scheduler.check()
    for seq in scheduler.running:
        for window, table in zip(scheduler.kv.windows, seq.tables, strict=True):
            held = sum(block_id != HOLE for block_id in table)
            assert held <= spanned(window, -(-scheduler.limits.max_model_len // BLOCK))


@settings(max_examples=200, deadline=None)
@given(requests=requests, windows=windows, data=st.data(), caching=st.booleans(), cancel=st.integers(0, 30))
def test_every_token_sees_its_own_past_whatever_happens(
    requests: list[tuple[int, int, int, int, int, int, bool]],
    windows: Windows,
    data: st.DataObject,
    caching: bool,
    cancel: int,
) -> None:
    least = 7
    sizes = [min(spanned(window, least), least) + data.draw(st.integers(0, 5)) for window in windows]
    scheduler = make_scheduler(windows, sizes, caching=caching)
    memory = GroupMemory(windows, sizes)
    arrivals: dict[int, list[Sequence]] = {}
    everyone: dict[str, Sequence] = {}
    for index, (length, prefix, priority, max_tokens, step, n, ignore_eos) in enumerate(requests):
        prompt = [1 + (prefix * 17 + i) % (VOCAB - 1) for i in range(length)]
        seq = make_sequence(
            str(index), prompt, index, priority=priority, max_tokens=max_tokens, n=n, ignore_eos=ignore_eos
        )
        arrivals.setdefault(step, []).append(seq)
        everyone[seq.request.id] = seq
    ended: dict[tuple[str, int], str] = {}
    produced: dict[tuple[str, int], list[int]] = defaultdict(list)
    for step in range(500):
        for seq in arrivals.pop(step, []):
            scheduler.add(seq)
        if step == cancel and scheduler.find("0"):
            for seq in scheduler.find("0"):
                scheduler.end(seq, "abort")
            del everyone["0"]
        check_held(scheduler)
        if not scheduler.has_work and not arrivals:
            break
        plan = scheduler.plan()
        assert plan.rows or not scheduler.has_work, "work is waiting and nothing runs"
        check_held(scheduler)
        for event in scheduler.commit(plan, memory.run(plan, {seq.key: seq for seq in scheduler.running})):
            produced[event.request_id, event.index] += event.token_ids
            if event.finish_reason:
                ended[event.request_id, event.index] = event.finish_reason
    for name, seq in everyone.items():
        for index in range(seq.request.sampling.n):
            expected = undisturbed(seq, index, scheduler.limits.max_model_len)
            assert (produced[name, index], ended[name, index]) == expected
    assert [pool.num_used for pool in scheduler.kv.pools] == [0] * len(windows)


@settings(max_examples=300, deadline=None)
@given(windows=windows, data=st.data(), length=st.integers(1, 41))
def test_a_prefix_is_as_long_as_every_group_can_go_on_after(
    windows: Windows, data: st.DataObject, length: int
) -> None:
    kv = KVCache(tuple(BlockPool(40) for _ in windows), BLOCK, windows, salt=SALT)
    tokens = list(range(1, length + 1))
    hashes = []
    for start in range(0, length - BLOCK + 1, BLOCK):
        hashes.append(chain_hash(hashes[-1] if hashes else SALT, tokens[start : start + BLOCK]))
    cached: list[dict[int, int]] = []
    for pool in kv.pools:
        missing = data.draw(st.sets(st.integers(0, 9), max_size=3))
        cached.append({})
        for index, block_hash in enumerate(hashes):
            if index not in missing:
                (cached[-1][index],) = pool.allocate(1) or ()
                pool.register(cached[-1][index], block_hash)
        pool.release(cached[-1].values())

    def seen(window: int, count: int) -> list[int]:
        """The blocks before `count` of which the next token sees anything."""
        position = count * BLOCK
        return sorted({at // BLOCK for at in range(max(0, position - window + 1) if window else 0, position)})

    expected = max(
        count
        for count in range((length - 1) // BLOCK + 1)
        if all(set(seen(w, count)) <= set(held) for w, held in zip(windows, cached, strict=True))
    )
    seq = make_sequence("r", tokens, 0)
    assert kv.admit(seq, spare=0, chunk=BUDGET)
    assert seq.num_computed == expected * BLOCK
    for window, held, table in zip(windows, cached, seq.tables, strict=True):
        visible = seen(window, expected)
        assert [table[index] for index in visible] == [held[index] for index in visible]
    kv.check([seq])


def test_a_long_prompt_asks_a_window_only_for_what_it_needs_at_once() -> None:
    scheduler = make_scheduler((0, 5), (14, 4), caching=False)
    memory = GroupMemory((0, 5), (14, 4))
    seq = make_sequence("r", [1 + i % 40 for i in range(50)], 0, max_tokens=3, ignore_eos=True)
    scheduler.add(seq)
    used = []
    while scheduler.has_work:
        plan = scheduler.plan()
        used.append([pool.num_used for pool in scheduler.kv.pools])
        scheduler.commit(plan, memory.run(plan, {seq.key: seq}))
    assert len(used) == 9
    assert {full for full, _ in used} == {13}
    # The 8 tokens of a step and 4 before them lie in 4 blocks at most; one token sees 5, in 2.
    assert max(window for _, window in used) == 4
    assert used[-1] == [13, 2]


def test_a_window_group_that_is_short_makes_the_lowest_claim_give_way() -> None:
    scheduler = make_scheduler((0, 9), (40, 7), caching=False)
    memory = GroupMemory((0, 9), (40, 7))
    for index in range(3):
        scheduler.add(make_sequence(str(index), [1 + index] * 3, index, max_tokens=20, ignore_eos=True))
    preempted: list[str] = []
    while scheduler.has_work:
        plan = scheduler.plan()
        preempted += plan.preempted
        scheduler.commit(plan, memory.run(plan, {seq.key: seq for seq in scheduler.running}))
        check_held(scheduler)
    assert preempted
    assert "0" not in preempted


def test_continuations_hold_the_same_holes_and_copy_one_block_of_each_group() -> None:
    scheduler = make_scheduler((0, 5), (30, 30), caching=False)
    memory = GroupMemory((0, 5), (30, 30))
    seq = make_sequence("r", [1 + i for i in range(30)], 0, n=3, max_tokens=9, ignore_eos=True)
    scheduler.add(seq)
    while len(scheduler.running) != 3:
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan, {seq.key: seq for seq in scheduler.running}))
    assert [pool.num_used for pool in scheduler.kv.pools] == [8, 2]
    plan = scheduler.plan()
    assert sorted(copy.source.group for copy in plan.copies) == [0, 0, 1, 1]
    assert [pool.num_used for pool in scheduler.kv.pools] == [10, 4]


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_a_failed_sequence_gave_back_before_is_not_found_either(chunks: int) -> None:
    scheduler = make_scheduler((2,), (9,), caching=True)
    seq = make_sequence("bad", [1 + i for i in range(30)], 0)
    scheduler.add(seq)
    for _ in range(chunks):
        scheduler.commit(scheduler.plan(), StepResult((RowResult(),)))
    assert seq.tables[0][0] == HOLE
    assert scheduler.kv.pools[0].find(seq.block_hashes[0]) is not None
    scheduler.commit(scheduler.plan(), StepResult((RowResult((0,), failed=True),)))
    assert all(scheduler.kv.pools[0].find(block_hash) is None for block_hash in seq.block_hashes)
    assert scheduler.kv.pools[0].num_cached == 0
    scheduler.check()
