"""A `CopyEngine` of one thread that copies while steps run, in portions, each batch in its turn. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy as copied
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple, Protocol

from appliance.engine.errors import CopyError
from appliance.engine.tiers.copy_engine import Ticket, Traffic, Way, way_of
from appliance.engine.types import BlockCopy, BlockRef


class Run(NamedTuple):
    """Copies of `num_blocks` blocks that lie side by side in their pools, of which `first` is the first."""

    first: BlockCopy
    num_blocks: int
    way: Way
    num_bytes: int


class Mover(Protocol):
    """Moves the bytes. The engine's thread calls the last three, whoever submits the others."""

    @property
    def portion_bytes(self) -> int:
        """What is moved before it is somebody else's turn."""

    def num_blocks(self, group: int, tier: str) -> int:
        """The size of a pool."""

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a KV group."""

    def fence(self) -> object:
        """What marks the end of all that the caller has had the device begin until now."""

    def pass_fence(self, fence: object) -> None:
        """Wait for that end."""

    def move(self, run: Run) -> None:
        """Move a run, or begin to. Until `finish`, all runs go one way."""

    def finish(self) -> None:
        """Wait until all that was begun is moved."""


@dataclass(eq=False, slots=True)
class _Job:
    """A ticket on its way.

    Attributes:
        runs: what is left to move.
        waits_for, followers: jobs that have a block in common, before it and behind it.
        fillers: those before it that were to fill its sources.
    """

    ticket: Ticket
    runs: deque[Run]
    fence: object
    waits_for: set[_Job] = field(default_factory=set)
    followers: list[_Job] = field(default_factory=list)
    fillers: dict[_Job, BlockCopy] = field(default_factory=dict)

    def doubt(self) -> CopyError | None:
        """Why there is nothing to copy, None where there is."""
        failed = next((pair for pair in self.fillers.items() if pair[0].ticket.error), None)
        return failed and CopyError(failed[1], f"its source was never filled ({failed[0].ticket.error})")


@dataclass(slots=True)
class _Block:
    """A block that a ticket touched of which `completed` has not told: the last one, and the last that writes it."""

    toucher: _Job
    writer: _Job | None = None


class CopyThread:
    """Copies blocks by a thread of its own, which ends with it and sleeps where there is nothing to do.

    Batches whose turn has come take turns by portions, so that a small one waits for a portion of each of the others
    and not for all of a big one.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")
        self._lock = Lock()
        self._closed = False
        self._traffic = {way: Traffic() for way in Way}
        self._untold: dict[_Job, None] = {}
        self._blocks: dict[BlockRef, _Block] = {}

    def submit(self, copies: Sequence[BlockCopy]) -> Ticket:
        assert copies, "a batch has at least one copy"
        for copy in copies:
            assert copy.source.group == copy.target.group, f"{copy} goes from one group to another"
            for ref in (copy.source, copy.target):
                assert 0 <= ref.id < self._mover.num_blocks(ref.group, ref.tier), f"{ref} is outside its pool"
        job = _Job(Ticket(copies), deque(self._runs(copies)), self._mover.fence())
        with self._lock:
            assert not self._closed, "the engine is closed"
            self._untold[job] = None
            for run in job.runs:
                self._traffic[run.way].in_flight_bytes += run.num_bytes
            self._queue(job)
            if not job.waits_for:
                self._thread.submit(self._advance, job)
        return job.ticket

    def completed(self) -> list[Ticket]:
        with self._lock:
            done = [job for job in self._untold if job.ticket.done]
            for job in done:
                del self._untold[job]
                self._leave(job)
        return [job.ticket for job in done]

    def traffic(self, way: Way) -> Traffic:
        with self._lock:
            return copied(self._traffic[way])

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for job in self._untold:
                if not job.ticket.done:
                    self._end(job, CopyError(job.runs[0].first, "KV memory was closed before"))

    def _runs(self, copies: Sequence[BlockCopy]) -> Iterator[Run]:
        """The copies, neighbours joined, in their order; none larger than a portion unless it is one block."""
        start = 0
        for stop in range(1, len(copies) + 1):
            first, count = copies[start], stop - start
            block_bytes = self._mover.block_bytes(first.source.group)
            fits = stop < len(copies) and (count + 1) * block_bytes <= self._mover.portion_bytes
            if not (fits and _adjoin(copies[stop - 1], copies[stop])):
                yield Run(first, count, way_of(first), count * block_bytes)
                start = stop

    def _queue(self, job: _Job) -> None:
        """Put a job behind those that touch its blocks."""
        for copy in job.ticket.copies:
            for ref in (copy.source, copy.target):
                block = self._blocks.get(ref)
                if block is None:
                    block = self._blocks[ref] = _Block(job)
                before, block.toucher = block.toucher, job
                if before is not job and before not in job.waits_for and not before.ticket.done:
                    job.waits_for.add(before)
                    before.followers.append(job)
                if ref is copy.target:
                    block.writer = job
                elif block.writer is not None and block.writer is not job:
                    job.fillers.setdefault(block.writer, copy)

    def _advance(self, job: _Job) -> None:
        """Move one portion of a job, then let others have their turn. Runs in the thread."""
        error = job.doubt() or self._move_portion(job)
        with self._lock:
            if error or not job.runs:
                self._end(job, error)
            elif not self._closed:
                self._thread.submit(self._advance, job)

    def _move_portion(self, job: _Job) -> CopyError | None:
        portion = self._portion(job.runs)
        at = portion[0].first
        try:
            self._mover.pass_fence(job.fence)
            start = time.perf_counter()
            for run in portion:
                at = run.first
                self._mover.move(run)
            self._mover.finish()
            seconds = time.perf_counter() - start
        except Exception as error:
            # The thread's edge: whatever went wrong is the ticket's, and others go on.
            return CopyError(at, f"{type(error).__name__}: {error}")
        with self._lock:
            for _ in portion:
                job.runs.popleft()
            self._traffic[portion[0].way].note(sum(run.num_bytes for run in portion), seconds)
        return None

    def _portion(self, runs: deque[Run]) -> list[Run]:
        """The first runs, all the same way, that are a portion together."""
        portion: list[Run] = []
        left = self._mover.portion_bytes
        for run in runs:
            left -= run.num_bytes
            if portion and (left < 0 or run.way is not portion[0].way):
                break
            portion.append(run)
        return portion

    def _leave(self, job: _Job) -> None:
        """Forget of its blocks that a job touched them."""
        for copy in job.ticket.copies:
            for ref in (copy.source, copy.target):
                block = self._blocks.get(ref)
                if block is not None and block.toucher is job:
                    del self._blocks[ref]

    def _end(self, job: _Job, error: CopyError | None) -> None:
        """With the lock held: end a job, and begin those that waited for it alone."""
        for run in job.runs:
            self._traffic[run.way].in_flight_bytes -= run.num_bytes
        job.fillers.clear()
        job.ticket.end(error)
        for follower in job.followers:
            follower.waits_for.discard(job)
            if not (follower.waits_for or self._closed):
                self._thread.submit(self._advance, follower)


def _adjoin(one: BlockCopy, other: BlockCopy) -> bool:
    """Whether two copies are one of two blocks. Inside a tier none are: the second may read what the first wrote."""
    source, target = one.source, one.target
    return (
        source.id + 1 == other.source.id
        and target.id + 1 == other.target.id
        and source.tier == other.source.tier
        and target.tier == other.target.tier
        and source.tier != target.tier
        and source.group == other.source.group
    )
