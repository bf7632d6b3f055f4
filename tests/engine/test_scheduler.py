"""The scheduler against brute force: a planner that only counts, and a model whose memory is read back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.blocks import BlockPool
from appliance.engine.kv_cache import KVCache
from appliance.engine.scheduler import Scheduler, SchedulerLimits
from appliance.engine.types import Request, SamplingParams, Sequence, StepPlan, StepResult, TokenEvent

BLOCK = 4
VOCAB = 50
EOS = 0


def make_scheduler(num_blocks: int, *, caching: bool, max_num_seqs: int = 4, budget: int = 8) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, budget, num_blocks * BLOCK, frozenset({EOS}))
    return Scheduler(KVCache((BlockPool(num_blocks, caching=caching),), BLOCK, salt=b"x" * 32), limits)


def make_sequence(
    name: str, prompt: list[int], arrived: float, *, priority: int = 0, max_tokens: int = 6
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(
        id=name, prompt_ids=tuple(prompt), sampling=sampling, arrived_at=arrived, priority=priority
    )
    return Sequence(request, list(prompt), seed=0)


def next_token(tokens: list[int]) -> int:
    """A model: the next token depends on every token before it, and now and then ends the text."""
    return random.Random(repr(tokens)).randrange(VOCAB)


def undisturbed(seq: Sequence, max_model_len: int) -> tuple[list[int], str]:
    """What a request must produce whatever happens around it."""
    tokens = list(seq.request.prompt_ids)
    while True:
        token = next_token(tokens)
        if token == EOS:
            return tokens[seq.num_prompt :], "stop"
        tokens.append(token)
        if len(tokens) - seq.num_prompt == seq.request.sampling.max_tokens or len(tokens) == max_model_len:
            return tokens[seq.num_prompt :], "length"


class MemoryModel:
    """Runs plans over a memory of token ids: a row's context is what its block table holds, nothing else."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = [[-1] * BLOCK for _ in range(num_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.rows:
            for offset, token in enumerate(row.token_ids):
                block, place = divmod(row.start + offset, BLOCK)
                self.memory[row.tables[0][block]][place] = token
        sampled: list[tuple[int, ...]] = []
        for row in plan.rows:
            held = [token for block in row.tables[0] for token in self.memory[block]]
            context = held[: row.start + row.n_tokens]
            sampled.append((next_token(context),) if row.wants_logits else ())
        return StepResult(tuple(sampled))


requests = st.lists(
    st.tuples(
        st.integers(1, 18),  # prompt length
        st.integers(0, 2),  # which common prefix
        st.integers(0, 2),  # priority
        st.integers(1, 9),  # max_tokens
        st.integers(0, 12),  # step of arrival
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=300, deadline=None)
@given(requests=requests, num_blocks=st.integers(5, 14), caching=st.booleans(), cancel=st.integers(0, 30))
def test_every_request_gets_its_own_text_whatever_happens(
    requests: list[tuple[int, int, int, int, int]], num_blocks: int, caching: bool, cancel: int
) -> None:
    scheduler = make_scheduler(num_blocks, caching=caching)
    memory = MemoryModel(num_blocks)
    arrivals: dict[int, list[Sequence]] = {}
    everyone: dict[str, Sequence] = {}
    for index, (length, prefix, priority, max_tokens, step) in enumerate(requests):
        prompt = [1 + (prefix * 17 + i) % (VOCAB - 1) for i in range(length)]
        seq = make_sequence(str(index), prompt, index, priority=priority, max_tokens=max_tokens)
        arrivals.setdefault(step, []).append(seq)
        everyone[seq.id] = seq
    ended: dict[str, TokenEvent] = {}
    produced: dict[str, list[int]] = {name: [] for name in everyone}
    cancelled = None
    for step in range(500):
        for seq in arrivals.pop(step, []):
            scheduler.add(seq)
            scheduler.check()
        if step == cancel and (victim := scheduler.find("0")):
            scheduler.remove(victim)
            cancelled = victim.id
            scheduler.check()
        if not scheduler.has_work and not arrivals:
            break
        plan = scheduler.plan()
        assert plan.n_tokens <= scheduler.limits.token_budget
        assert plan.rows or not scheduler.has_work, "work is waiting and nothing runs"
        scheduler.check()
        for event in scheduler.commit(plan, memory.run(plan)):
            assert event.request_id not in ended, "an event after the terminal one"
            produced[event.request_id] += event.token_ids
            if event.finish_reason:
                ended[event.request_id] = event
        scheduler.check()
    assert set(ended) | {cancelled} - {None} == set(everyone)
    for name, event in ended.items():
        text, reason = undisturbed(everyone[name], scheduler.limits.max_model_len)
        assert (produced[name], event.finish_reason) == (text, reason)
    assert scheduler.kv.pools[0].num_used == 0


def naive_plan(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Rows (id, start, tokens) and preempted ids, found by counting alone. Without a prefix cache."""
    held = {s.id: len(s.tables[0]) for s in scheduler.running}
    free = scheduler.kv.pools[0].num_blocks - sum(held.values())
    running = sorted(scheduler.running, key=lambda s: (s.request.priority, s.request.arrived_at))
    budget, rows, preempted = scheduler.limits.token_budget, [], []
    alive = list(running)
    for seq in running:
        if seq not in alive:
            continue
        behind = len(alive) - alive.index(seq) - 1
        n = min(len(seq.tokens) - seq.num_computed, budget - behind)
        need = -(-(seq.num_computed + n) // BLOCK) - held[seq.id]
        while need > free and seq in alive:
            victim = alive.pop()
            free += held[victim.id]
            preempted.append(victim.id)
        if seq in alive:
            free -= max(0, need)
            rows.append((seq.id, seq.num_computed, n))
            budget -= n
    if not preempted:
        count = len(alive)
        for seq in scheduler.waiting:
            need = -(-len(seq.tokens) // BLOCK)
            if budget == 0 or count == scheduler.limits.max_num_seqs or need + count > free:
                break
            free -= need
            n = min(len(seq.tokens), budget)
            rows.append((seq.id, 0, n))
            budget, count = budget - n, count + 1
    return rows, preempted


@settings(max_examples=200, deadline=None)
@given(requests=requests, num_blocks=st.integers(5, 14))
def test_plans_equal_those_of_a_planner_that_only_counts(
    requests: list[tuple[int, int, int, int, int]], num_blocks: int
) -> None:
    scheduler = make_scheduler(num_blocks, caching=False)
    memory = MemoryModel(num_blocks)
    pending = sorted(enumerate(requests), key=lambda item: item[1][4])
    for step in range(500):
        while pending and pending[0][1][4] <= step:
            index, (length, _, priority, max_tokens, _) = pending.pop(0)
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
    alive = {seq.id for seq in scheduler.running}
    plan = scheduler.plan()
    scheduler.commit(plan, memory.run(plan))
    plan = scheduler.plan()
    sizes = {row.request_id: row.n_tokens for row in plan.rows}
    assert sizes.pop("long") == scheduler.limits.token_budget - len(sizes)
    assert set(sizes) == alive & {seq.id for seq in scheduler.running}
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
    (event,) = scheduler.commit(plan, StepResult(((0,),), failed=frozenset({0})))
    assert event.error is not None
    assert (event.finish_reason, event.error.code) == ("error", "numerical_error")
    scheduler.add(make_sequence("again", prompt, 1))
    assert scheduler.plan().rows[0].start == 0
