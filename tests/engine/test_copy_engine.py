"""Copies between tiers: in the promised order, whatever fails, by a thread that comes and goes with the engine."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from block_copies import copy
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.errors import CopyError
from appliance.engine.tiers.copy_engine import CopyEngine, Ticket, Traffic, Way
from appliance.engine.tiers.copy_thread import CopyThread, Run
from appliance.engine.tiers.memory import HostPool, MemoryMover
from appliance.engine.types import BlockCopy, BlockRef

TIERS = ("device", "host")
BLOCK_BYTES = (96, 160)
BLOCKS = (7, 9)


class Controlled(MemoryMover):
    """Moves bytes once it may, in portions of two blocks of group 0 or one of group 1, and fails on demand."""

    portion_bytes = 2 * BLOCK_BYTES[0]

    def __init__(self, device: list[torch.Tensor], host: list[HostPool]) -> None:
        super().__init__(device, host)
        self.may_move = threading.Event()
        self.may_move.set()
        self.begun: deque[Run] = deque()
        self.broken: Callable[[BlockCopy], BaseException | None] = lambda _copy: None

    def move(self, run: Run) -> None:
        self.begun.append(run)
        assert self.may_move.wait(60)
        error = self.broken(run.first)
        if error is not None:
            raise error
        super().move(run)


class Memory:
    """Two groups' blocks in both tiers under an engine, beside a plain model of what they hold."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        shapes = list(zip(BLOCKS, BLOCK_BYTES, strict=True))
        self.device = [
            torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes
        ]
        self.host = [HostPool(*shape) for shape in shapes]
        self.mover = Controlled(self.device, self.host)
        self.engine: CopyEngine = CopyThread(self.mover)
        self.model = {
            BlockRef(group, tier, block): self.read(BlockRef(group, tier, block))
            for group, count in enumerate(BLOCKS)
            for tier in TIERS
            for block in range(count)
        }

    def read(self, ref: BlockRef) -> bytes:
        memory, index = (
            (self.device[ref.group], ref.id) if ref.tier == "device" else self.host[ref.group].locate(ref.id)
        )
        return bytes(memory[index].tolist())

    def submit(self, *copies: BlockCopy) -> Ticket:
        """Submit, and let the model make the copies at once."""
        for each in copies:
            self.model[each.target] = self.model[each.source]
        return self.engine.submit(copies)

    def holds_the_model(self) -> bool:
        return {ref: self.read(ref) for ref in self.model} == self.model


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.mover.may_move.set()
    memory.engine.close()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# Order

BATCHES = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(TIERS),
            st.integers(0, 3),
            st.sampled_from(TIERS),
            st.integers(0, 3),
            # Neighbours are joined.
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=8,
)


@given(BATCHES, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_any_schedule_is_as_if_made_one_after_the_other(
    batches: list[list[tuple[int, str, int, str, int, int]]], rng: random.Random
) -> None:
    memory = Memory()
    told: list[Ticket] = []
    tickets = []
    for batch in batches:
        copies = [
            BlockCopy(BlockRef(group, a, i + k), BlockRef(group, b, j + k))
            for group, a, i, b, j, count in batch
            for k in range(count)
        ]
        if rng.random() < 0.3:
            memory.mover.may_move.clear()
        tickets.append(memory.submit(*copies))
        if rng.random() < 0.3:
            memory.mover.may_move.set()
        if rng.random() < 0.3:
            told += memory.engine.completed()
    memory.mover.may_move.set()
    assert all(ticket.wait(60) and ticket.error is None for ticket in tickets)
    told += memory.engine.completed()
    assert sorted(map(tickets.index, told)) == list(range(len(tickets)))
    assert memory.engine.completed() == []
    assert memory.holds_the_model()
    assert all(memory.engine.traffic(way).in_flight_bytes == 0 for way in Way)
    memory.engine.close()


def test_tickets_of_a_common_block_wait_and_others_do_not(memory: Memory) -> None:
    memory.mover.may_move.clear()
    first = memory.submit(copy("d0", "h0"), copy("d5", "h5"), copy("d3", "h3"))
    reader = memory.submit(copy("h0", "d1"))
    writer = memory.submit(copy("d2", "h0"))
    apart = memory.submit(copy("d4", "h4"))
    wait_for(lambda: len(memory.mover.begun) == 1)
    assert [ticket.done for ticket in (first, reader, writer, apart)] == [False] * 4
    memory.mover.may_move.set()
    assert writer.wait(60)
    begun = [run.first for run in memory.mover.begun]
    assert begun.index(apart.copies[0]) < begun.index(first.copies[2])
    assert begun[-2:] == [reader.copies[0], writer.copies[0]]
    assert memory.engine.completed() == [first, reader, writer, apart]
    assert memory.holds_the_model()


def test_a_small_batch_waits_for_one_portion_of_a_big_one(memory: Memory) -> None:
    memory.mover.may_move.clear()
    big = memory.submit(*(copy(f"d{i}", f"h{6 - i}", group=1) for i in range(7)))
    wait_for(lambda: len(memory.mover.begun) == 1)
    small = memory.submit(copy("d0", "h0"))
    memory.mover.may_move.set()
    assert big.wait(60)
    assert [run.first for run in memory.mover.begun].index(small.copies[0]) == 1


# Faults


def test_a_copy_that_fails_is_its_tickets_and_its_followers_alone(memory: Memory) -> None:
    before = dict(memory.model)
    memory.mover.broken = lambda made: OSError("no luck") if made == copy("d1", "h1") else None
    memory.mover.may_move.clear()
    failed = memory.engine.submit([copy("d0", "h5"), copy("d1", "h1")])
    reader = memory.engine.submit([copy("h1", "d3")])
    reader_of_reader = memory.engine.submit([copy("d4", "h4"), copy("d3", "h3")])
    refilled = memory.engine.submit([copy("d2", "h1"), copy("h1", "d6")])
    apart = memory.engine.submit([copy("d2", "h2")])
    memory.mover.may_move.set()
    assert refilled.wait(60)
    assert apart.wait(60)
    assert memory.engine.completed() == [failed, reader, reader_of_reader, refilled, apart]
    assert isinstance(failed.error, CopyError)
    assert failed.error.copy == copy("d1", "h1")
    assert str(failed.error) == (
        "KV block 1 of group 0 (device) was not copied to block 1 (host): OSError: no luck"
    )
    assert reader.error is not None
    assert "never filled" in str(reader.error)
    assert reader_of_reader.error is not None
    assert reader_of_reader.error.copy == copy("d3", "h3")
    assert (refilled.error, apart.error) == (None, None)
    # Nothing was copied that was never filled.
    assert memory.read(BlockRef(0, "device", 3)) == before[BlockRef(0, "device", 3)]
    assert memory.read(BlockRef(0, "device", 6)) == before[BlockRef(0, "device", 2)]
    assert all(memory.engine.traffic(way).in_flight_bytes == 0 for way in Way)


def test_what_failed_may_be_tried_again(memory: Memory) -> None:
    errors = [RuntimeError("once")]
    memory.mover.broken = lambda _copy: errors.pop() if errors else None
    first = memory.engine.submit([copy("d1", "h1")])
    assert first.wait(60)
    # It was not told of: who submits this does not know.
    unknowing = memory.engine.submit([copy("h1", "d2")])
    assert unknowing.wait(60)
    assert unknowing.error is not None
    assert memory.engine.completed() == [first, unknowing]
    again = memory.submit(copy("d1", "h1"), copy("h1", "d2"))
    assert again.wait(60)
    assert again.error is None
    assert memory.holds_the_model()


def test_closing_in_flight_ends_every_ticket_and_touches_nothing_afterwards(memory: Memory) -> None:
    memory.mover.may_move.clear()
    running = memory.engine.submit([copy("d0", "h0"), copy("d2", "h2"), copy("d4", "h4")])
    behind = memory.engine.submit([copy("h0", "d1")])
    wait_for(lambda: len(memory.mover.begun) == 1)
    closing = threading.Thread(target=memory.engine.close)
    closing.start()
    assert not running.wait(0.05)
    memory.mover.may_move.set()
    closing.join(60)
    assert [ticket.done for ticket in memory.engine.completed()] == [True, True]
    assert running.error is not None
    assert running.error.copy == copy("d4", "h4")
    assert behind.error is not None
    assert "closed" in str(behind.error)
    moved = len(memory.mover.begun)
    time.sleep(0.02)
    assert len(memory.mover.begun) == moved == 2
    assert all(memory.engine.traffic(way).in_flight_bytes == 0 for way in Way)


def test_blocks_outside_a_pool_are_refused_before_anything_moves(memory: Memory) -> None:
    for wrong in (copy("d7", "h0"), copy("d0", "h-1"), copy("h0", "d9")):
        with pytest.raises(AssertionError, match="outside its pool"):
            memory.engine.submit([copy("d1", "h1"), wrong])
    assert not memory.mover.begun


# Threads and time


def copy_threads() -> int:
    return sum(thread.name.startswith("kv-copies") for thread in threading.enumerate())


@pytest.mark.parametrize("closed", [True, False])
def test_its_thread_ends_with_it(closed: bool) -> None:
    gc.collect()
    before = copy_threads()
    memory = Memory()
    assert copy_threads() == before
    assert memory.submit(copy("d0", "h0")).wait(60)
    assert copy_threads() == before + 1
    if closed:
        memory.engine.close()
        assert copy_threads() == before
    else:
        del memory
        gc.collect()
        wait_for(lambda: copy_threads() == before)


def test_idle_it_takes_no_time(memory: Memory) -> None:
    assert memory.submit(copy("d0", "h0")).wait(60)
    process = psutil.Process()

    def switches() -> int:
        # A thread that polls is switched to and fro by each of its naps.
        return sum(process.num_ctx_switches())

    before = switches()
    time.sleep(0.3)
    assert switches() - before < 20


def test_in_flight_and_total_each_way(memory: Memory) -> None:
    memory.mover.may_move.clear()
    tickets = [
        memory.submit(copy("d0", "h0"), copy("d1", "h1"), copy("h3", "d3"), copy("d4", "d5")),
        memory.submit(copy("d2", "h2", group=1)),
    ]
    flying = {way: memory.engine.traffic(way).in_flight_bytes for way in Way}
    assert flying == {Way.OUT: 2 * 96 + 160, Way.IN: 96, Way.WITHIN: 96}
    memory.mover.may_move.set()
    assert all(ticket.wait(60) for ticket in tickets)
    assert all(memory.engine.traffic(way).in_flight_bytes == 0 for way in Way)
    totals = {way: memory.engine.traffic(way).bytes_total for way in Way}
    assert totals == flying
    assert all(memory.engine.traffic(way).bandwidth for way in Way)


def test_bandwidth_is_of_late_and_by_bytes() -> None:
    traffic = Traffic()
    assert traffic.bandwidth is None
    half_life = 64 * 2**20
    traffic.note(half_life, 1.0)
    assert traffic.bandwidth == half_life
    traffic.note(half_life, 0.25)
    # Half of what was, and all of what is new.
    assert traffic.bandwidth == pytest.approx(1.5 * half_life / 0.75)
    for _ in range(100):
        traffic.note(0, 0.0)
    assert traffic.bandwidth == pytest.approx(1.5 * half_life / 0.75)
