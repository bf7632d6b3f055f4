"""KV memory of marks: what each block of each tier holds, and the pools and the runner that work with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from itertools import chain

from appliance.engine.blocks import BlockPool
from appliance.engine.kv_cache import KVCache
from appliance.engine.types import (
    HOLE,
    BlockCopy,
    BlockRef,
    PlanRow,
    PositionLogprobs,
    RowResult,
    Sequence,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from sim.model import Text, candidates, next_token

POISON = -1
"""The mark of a place whose contents are lost."""


def spoilt_mark(request_id: str) -> int:
    """What a request writes, of whom the model computes what is not a number."""
    return -2 - int(request_id)


class WatchedPool(BlockPool):
    """A pool that tells which blocks' contents are lost: freed ones, and cached ones that are taken."""

    def __init__(self, num_blocks: int, *, caching: bool, on_lost: Callable[[Iterable[int]], None]) -> None:
        super().__init__(num_blocks, caching=caching)
        self._on_lost = on_lost

    def allocate(self, count: int) -> list[int] | None:
        taken = super().allocate(count)
        self._on_lost(taken or ())
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        released = list(block_ids)
        super().release(released)
        self._on_lost(block_id for block_id in released if block_id in self._free)

    def is_findable(self, block_id: int) -> bool:
        return self._blocks[block_id].hash is not None

    def forget(self, block_id: int) -> None:
        super().forget(block_id)
        self._on_lost([block_id] if block_id in self._free else ())


class WatchedCache(KVCache):
    """A cache that counts when it refused to grow a table, and asserts that it had to."""

    def __init__(self, pools: tuple[BlockPool, ...], block_size: int, windows: tuple[int, ...]) -> None:
        super().__init__(pools, block_size, windows, salt=b"simulated".ljust(32))
        self.num_refusals = 0
        self.most_available_at_refusal = 0.0

    def grow(self, seq: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        first_written = seq.num_computed // self.block_size
        missing = []
        for pool, table in zip(self.pools, seq.tables, strict=True):
            is_shared = first_written < len(table) and pool.is_shared(table[first_written])
            missing.append(-(-num_tokens // self.block_size) - len(table) + is_shared)
        available = [pool.num_available for pool in self.pools]
        copies = super().grow(seq, num_tokens)
        is_short = any(need > have for need, have in zip(missing, available, strict=True))
        assert (copies is None) == is_short, f"{seq.key} needs {missing} blocks, of {available}: {copies}"
        if copies is None:
            self.num_refusals += 1
            short = (
                have / pool.num_blocks
                for need, have, pool in zip(missing, available, self.pools, strict=True)
                if need > have
            )
            self.most_available_at_refusal = max(self.most_available_at_refusal, *short)
        return copies


class Memory:
    """The cells of all blocks, of every group in every tier.

    Contents are lost as soon as a block is; what a plan loses it may still copy from, since copies come first.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[BlockRef, list[int]] = {}
        self._lost: dict[BlockRef, None] = {}

    def make_pool(self, group: int, tier: str, num_blocks: int, *, caching: bool) -> WatchedPool:
        refs = [BlockRef(group, tier, block_id) for block_id in range(num_blocks)]
        self.blocks.update((ref, [POISON] * self.block_size) for ref in refs)

        def lose(block_ids: Iterable[int]) -> None:
            self._lost.update((refs[block_id], None) for block_id in block_ids)

        return WatchedPool(num_blocks, caching=caching, on_lost=lose)

    def settle(self, copies: Many[BlockCopy] = ()) -> None:
        """Make copies in their order, and poison what was lost meanwhile."""
        for copy in copies:
            self.blocks[copy.target] = list(self.blocks[copy.source])
        for ref in self._lost.keys() - {copy.target for copy in copies}:
            self.blocks[ref] = [POISON] * self.block_size
        self._lost.clear()


class StepBroke(Exception):
    """What the runner raises where a whole step is to fail."""


class Runner:
    """Runs plans over the memory, asserting that every row is what its text says and sees what it should."""

    def __init__(self, memory: Memory, pools: Many[WatchedPool], windows: Many[int]) -> None:
        self._memory = memory
        self._refs = [
            [BlockRef(group, "device", block_id) for block_id in range(pool.num_blocks)]
            for group, pool in enumerate(pools)
        ]
        self._pools = pools
        self._windows = windows

    def run(
        self, plan: StepPlan, texts: Callable[[PlanRow], Text], spoilt: set[str], *, breaks: bool
    ) -> StepResult:
        """Compute a step.

        Args:
            texts: the text that a row is of.
            spoilt: requests of whom the model computes what is not a number, which shows when logits are wanted; those
                that see anything of it join them.
            breaks: write rubbish and raise.

        Raises:
            StepBroke: it was asked to break.
        """
        self._memory.settle(plan.copies)
        for row in plan.rows:
            text, stop = texts(row), row.start + row.n_tokens
            assert list(row.token_ids) == text.tokens[row.start : stop], f"{_name(row)} has others' tokens"
            self._write(row, text.marks[row.start : stop])
            if breaks or row.request_id in spoilt:
                self._spoil(row)
        if breaks:
            raise StepBroke
        return StepResult(tuple(self._result(row, texts(row), spoilt) for row in plan.rows))

    def check_forgotten(self, request_id: str) -> None:
        """Assert that nobody can find what a request wrote that failed."""
        mark = spoilt_mark(request_id)
        for ref, marks in self._memory.blocks.items():
            if mark in marks:
                is_findable = self._pools[ref.group].is_findable(ref.id)
                assert not is_findable, f"{ref} of request {request_id}, which failed, can be found"

    def _write(self, row: PlanRow, marks: list[int]) -> None:
        size = self._memory.block_size
        for pool, refs, table in zip(self._pools, self._refs, row.tables, strict=True):
            for position, mark in enumerate(marks, row.start):
                block_id = table[position // size]
                assert block_id != HOLE, f"{_name(row)} writes to a hole at {position}"
                assert not pool.is_shared(block_id), (
                    f"{_name(row)} writes to block {block_id}, which is shared"
                )
                self._memory.blocks[refs[block_id]][position % size] = mark

    def _spoil(self, row: PlanRow) -> None:
        self._write(row, [spoilt_mark(row.request_id)] * row.n_tokens)

    def _result(self, row: PlanRow, text: Text, spoilt: set[str]) -> RowResult:
        found = [self._read(row, group, text) for group in range(len(self._windows))]
        seen = [marks for marks in found if marks is not None]
        if len(seen) < len(found):
            spoilt.add(row.request_id)
            self._spoil(row)
            return RowResult(failed=row.wants_logits or bool(row.targets))
        scores = tuple(
            PositionLogprobs(TokenLogprob(target, float(row.start + row.score_offset + place), 1))
            for place, target in enumerate(row.targets)
        )
        sampling = row.sampling
        if not row.wants_logits:
            return RowResult(prompt_logprobs=scores)
        if sampling.needs_context:
            assert list(row.context) == text.tokens[: row.start + row.n_tokens], f"{_name(row)}: context"
        token_ids = tuple(next_token(seen, seed, row.forbidden) for seed in row.seeds)
        if sampling.logprobs is None:
            return RowResult(token_ids, prompt_logprobs=scores)
        top = tuple(TokenLogprob(*each, 1) for each in candidates(seen, sampling.logprobs))
        return RowResult(token_ids, tuple(PositionLogprobs(top[0], top) for _ in token_ids), scores)

    def _read(self, row: PlanRow, group: int, text: Text) -> list[int] | None:
        """What the last token sees in a group; asserts that all tokens of the row see what they should.

        None: they do, but some of it is not a number.
        """
        size, window, stop = self._memory.block_size, self._windows[group], row.start + row.n_tokens
        first = max(0, row.start - window + 1) // size if window else 0
        table, refs = row.tables[group][first : -(-stop // size)], self._refs[group]
        assert HOLE not in table, f"{_name(row)} sees a hole of group {group} in {row.tables[group]}"
        held = list(chain.from_iterable(self._memory.blocks[refs[block_id]] for block_id in table))
        marks = held[: stop - first * size]
        expected = text.marks[first * size : stop]
        if marks != expected:
            pairs = enumerate(zip(marks, expected, strict=True), first * size)
            wrong = {
                at: "poison" if a == POISON else "another text" for at, (a, b) in pairs if a != b and a > -2
            }
            assert not wrong, f"{_name(row)} sees in group {group} what is not of its own text, at {wrong}"
            return None
        return marks[-window:]


def _name(row: PlanRow) -> str:
    return f"request {row.request_id}, continuation {row.index}"
