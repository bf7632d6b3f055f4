"""The scheduler against brute force: a planner that only counts, and a model whose memory is read back."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_model import EOS, VOCAB, make_sequence, next_token, requests, undisturbed

from appliance.engine.blocks import BlockPool
from appliance.engine.kv_cache import KVCache
from appliance.engine.scheduler import Scheduler, SchedulerLimits
from appliance.engine.types import RowResult, Sequence, StepPlan, StepResult

BLOCK = 4


def make_scheduler(num_blocks: int, *, caching: bool, max_num_seqs: int = 4, budget: int = 8) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, budget, num_blocks * BLOCK, frozenset({EOS}))
    return Scheduler(KVCache((BlockPool(num_blocks, caching=caching),), BLOCK, salt=b"x" * 32), limits)


class MemoryModel:
    """Runs plans over a memory of token ids: a row's context is what its block table holds, nothing else."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = [[-1] * BLOCK for _ in range(num_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self.memory[copy.target.id] = list(self.memory[copy.source.id])
        for row in plan.rows:
            for offset, token in enumerate(row.token_ids):
                block, place = divmod(row.start + offset, BLOCK)
                self.memory[row.tables[0][block]][place] = token
        results = []
        for row in plan.rows:
            held = [token for block in row.tables[0] for token in self.memory[block]]
            context = held[: row.start + row.n_tokens]
            results.append(RowResult(tuple(next_token(context, seed) for seed in row.seeds)))
        return StepResult(tuple(results))


@settings(max_examples=300, deadline=None)
@given(requests=requests, num_blocks=st.integers(5, 14), caching=st.booleans(), cancel=st.integers(0, 30))
def test_every_request_gets_its_own_text_whatever_happens(
    requests: list[tuple[int, int, int, int, int, int, bool]], num_blocks: int, caching: bool, cancel: int
) -> None:
    scheduler = make_scheduler(num_blocks, caching=caching)
    memory = MemoryModel(num_blocks)
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
    over: set[str] = set()
    produced: dict[tuple[str, int], list[int]] = defaultdict(list)
    for step in range(500):
        for seq in arrivals.pop(step, []):
            scheduler.add(seq)
            scheduler.check()
        if step == cancel and scheduler.find("0"):
            events = [scheduler.end(seq, "abort") for seq in scheduler.find("0")]
            assert [event.is_last for event in events] == [False] * (len(events) - 1) + [True]
            over.add("0")
            del everyone["0"]
            scheduler.check()
        if not scheduler.has_work and not arrivals:
            break
        plan = scheduler.plan()
        assert plan.n_tokens <= scheduler.limits.token_budget
        assert plan.rows or not scheduler.has_work, "work is waiting and nothing runs"
        scheduler.check()
        for event in scheduler.commit(plan, memory.run(plan)):
            key = (event.request_id, event.index)
            assert key not in ended, "an event after the end of a continuation"
            assert event.request_id not in over, "an event after the last one"
            produced[key] += event.token_ids
            if event.finish_reason:
                ended[key] = event.finish_reason
            if event.is_last:
                over.add(event.request_id)
        scheduler.check()
    for name, seq in everyone.items():
        assert name in over
        for index in range(seq.request.sampling.n):
            expected = undisturbed(seq, index, scheduler.limits.max_model_len)
            assert (produced[name, index], ended[name, index]) == expected
    assert scheduler.kv.pools[0].num_used == 0


def claim(seq: Sequence) -> tuple[bool, int, float]:
    return (seq.num_preemptions == 0, seq.request.priority, seq.request.arrived_at)


def naive_plan(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Rows (id, start, tokens) and preempted ids, found by counting alone. Without a prefix cache."""
    held = {s.key: len(s.tables[0]) for s in scheduler.running}
    free = scheduler.kv.pools[0].num_blocks - sum(held.values())
    running = sorted(scheduler.running, key=lambda s: (s.request.priority, s.request.arrived_at))
    budget, rows, preempted = scheduler.limits.token_budget, [], []
    alive = list(running)
    for seq in running:
        if seq not in alive:
            continue
        behind = len(alive) - alive.index(seq) - 1
        n = min(len(seq.tokens) - seq.num_computed, budget - behind)
        need = -(-(seq.num_computed + n) // BLOCK) - held[seq.key]
        while need > free and seq in alive:
            victim = alive.pop()
            free += held[victim.key]
            preempted.append(victim.request.id)
        if seq in alive:
            free -= max(0, need)
            rows.append((seq.request.id, seq.num_computed, n))
            budget -= n
    if not preempted:
        count = len(alive)
        for seq in sorted(scheduler.waiting, key=claim):
            need = -(-len(seq.tokens) // BLOCK)
            if budget == 0 or count == scheduler.limits.max_num_seqs or need + count > free:
                break
            free -= need
            n = min(len(seq.tokens), budget)
            rows.append((seq.request.id, 0, n))
            budget, count = budget - n, count + 1
    return rows, preempted


@settings(max_examples=200, deadline=None)
@given(requests=requests, num_blocks=st.integers(5, 14))
def test_plans_equal_those_of_a_planner_that_only_counts(
    requests: list[tuple[int, int, int, int, int, int, bool]], num_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks, caching=False)
    memory = MemoryModel(num_blocks)
    pending = sorted(enumerate(requests), key=lambda item: item[1][4])
    for step in range(900):
        while pending and pending[0][1][4] <= step:
            index, (length, _, priority, max_tokens, _, _, _) = pending.pop(0)
            scheduler.add(
                make_sequence(str(index), [1] * length, index, priority=priority, max_tokens=max_tokens)
            )
        if not scheduler.has_work and not pending:
            return
        expected = naive_plan(scheduler)
        plan = scheduler.plan()
        assert ([(r.request_id, r.start, r.n_tokens) for r in plan.rows], list(plan.preempted)) == expected
        scheduler.commit(plan, memory.run(plan))
    pytest.fail("the scheduler did not finish")


def test_a_long_prompt_does_not_stop_the_others_next_tokens() -> None:
    scheduler = make_scheduler(40, caching=False)
    memory = MemoryModel(40)
    for index in range(3):
        scheduler.add(make_sequence(f"short{index}", [1 + index], index, max_tokens=30))
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    scheduler.add(make_sequence("long", [7] * 60, 9.0, priority=-1))
    alive = {seq.request.id for seq in scheduler.running}
    plan = scheduler.plan()
    scheduler.commit(plan, memory.run(plan))
    plan = scheduler.plan()
    sizes = {row.request_id: row.n_tokens for row in plan.rows}
    assert sizes.pop("long") == scheduler.limits.token_budget - len(sizes)
    assert set(sizes) == alive & {seq.request.id for seq in scheduler.running}
    assert set(sizes.values()) == {1}


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make_scheduler(20, caching=True, budget=64)
    memory = MemoryModel(20)
    prompt = list(range(1, 18))
    scheduler.add(make_sequence("first", prompt, 0, max_tokens=1))
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    scheduler.add(make_sequence("second", [*prompt[:16], 40], 1, max_tokens=1))
    plan = scheduler.plan()
    assert [(row.start, row.token_ids) for row in plan.rows] == [(16, (40,))]
    assert scheduler.kv.hit_tokens_total == 16


def test_blocks_of_a_failed_row_are_not_found_again() -> None:
    scheduler = make_scheduler(20, caching=True, budget=64)
    prompt = list(range(1, 18))
    scheduler.add(make_sequence("bad", prompt, 0))
    plan = scheduler.plan()
    (event,) = scheduler.commit(plan, StepResult((RowResult((0,), failed=True),)))
    assert event.error is not None
    assert (event.finish_reason, event.error.code) == ("error", "numerical_error")
    scheduler.add(make_sequence("again", prompt, 1))
    assert scheduler.plan().rows[0].start == 0


def test_continuations_share_the_prompts_blocks_until_they_write() -> None:
    scheduler = make_scheduler(40, caching=False, budget=64)
    memory = MemoryModel(40)
    scheduler.add(make_sequence("r", list(range(1, 31)), 0, n=4, max_tokens=20))
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    living = len(scheduler.running)
    assert scheduler.kv.pools[0].num_used == 8  # 30 tokens; the last block holds 2 of them
    plan = scheduler.plan()
    assert len(plan.copies) == living - 1  # the last to write has the block for itself
    assert scheduler.kv.pools[0].num_used == 7 + living
    scheduler.check()


def test_a_block_is_found_only_after_the_same_history() -> None:
    scheduler = make_scheduler(20, caching=True, budget=64)
    memory = MemoryModel(20)
    same = [9, 9, 9, 9]
    scheduler.add(make_sequence("a", [1, 2, 3, 4, *same, 5], 0, max_tokens=1))
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    scheduler.add(make_sequence("b", [4, 3, 2, 1, *same, 5], 1, max_tokens=1))
    assert scheduler.plan().rows[0].start == 0
    scheduler.check()
    scheduler.add(make_sequence("c", [*same, 5], 2, max_tokens=1))
    assert scheduler.plan().rows[-1].start == 0


def test_what_followed_a_prefix_is_given_up_before_it() -> None:
    scheduler = make_scheduler(8, caching=True, budget=64)
    memory = MemoryModel(8)
    prompt = list(range(1, 30))  # 8 blocks, 7 of them full
    scheduler.add(make_sequence("first", prompt, 0, max_tokens=1))
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    scheduler.add(make_sequence("other", [40] * 15, 1, max_tokens=1))  # takes 4 blocks
    scheduler.commit(plan := scheduler.plan(), memory.run(plan))
    scheduler.add(make_sequence("again", prompt, 2, max_tokens=1))
    assert scheduler.plan().rows[0].start == 16


def test_a_failure_in_a_later_chunk_forgets_the_chunks_before_it() -> None:
    scheduler = make_scheduler(20, caching=True, budget=8)
    prompt = list(range(1, 18))
    scheduler.add(make_sequence("bad", prompt, 0))
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult((RowResult(),)))
    assert scheduler.kv.pools[0].find(scheduler.running[0].block_hashes[0]) is not None
    scheduler.commit(scheduler.plan(), StepResult((RowResult(failed=True),)))
    scheduler.add(make_sequence("again", prompt, 1))
    assert scheduler.plan().rows[0].start == 0


def test_a_failure_forgets_what_was_computed_before_a_preemption_too() -> None:
    kv = KVCache((BlockPool(8),), BLOCK, salt=b"x" * 32)
    seq = make_sequence(
        "bad", list(range(1, 18)), 0, prompt_logprobs=0
    )  # looks for nothing, so it computes all again
    for num_tokens in (12, 8):
        kv.admit(seq, spare=0, chunk=12)
        kv.advance(seq, num_tokens)
        kv.release(seq)
    assert kv.pools[0].num_cached == 3
    kv.forget(seq)
    assert kv.pools[0].num_cached == 0


def test_hashes_mean_nothing_to_another_cache() -> None:
    found = []
    for _ in range(2):
        limits = SchedulerLimits(4, 64, 80, frozenset({EOS}))
        scheduler = Scheduler(KVCache((BlockPool(20),), BLOCK), limits)
        seq = make_sequence("a", list(range(1, 10)), 0)
        scheduler.add(seq)
        scheduler.plan()
        found.append(seq.block_hashes[0])
    assert found[0] != found[1]
