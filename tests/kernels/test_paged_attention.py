"""Paged attention against a softmax written out in float64, and against itself in other batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from appliance.engine.batch import Batch, build_batch
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import HOLE, PlanRow
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.kernels.paged_attention import kv_tiles, kv_write, paged_attention

NUM_BLOCKS = 200


class Memory:
    """A pool with the keys and values of some sequences in randomly placed blocks, everything else poisoned."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        sinks: torch.Tensor | None = None,
        window: int = 0,
    ) -> None:
        self.sinks, self.window = sinks, window
        layout = KVLayout((KVGroup((3, 5), kv_heads, head_dim, torch.float32),), block_size)
        self.pool = layout.allocate(0, NUM_BLOCKS)
        self.block_size, self.heads = block_size, heads
        free = random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.tables = [tuple(free.pop() for _ in range(-(-length // block_size))) for length in lengths]
        for block in free:
            self.pool[block] = float("nan")
        self.keys = [torch.randn(length, kv_heads, head_dim) for length in lengths]
        self.values = [torch.randn(length, kv_heads, head_dim) for length in lengths]
        self.queries = [torch.randn(length, heads, head_dim) for length in lengths]

    def rows(self, parts: Sequence[tuple[int, int, int]]) -> list[PlanRow]:
        """Of a plan that computes tokens start … stop - 1 of each given (sequence, start, stop)."""
        return [
            PlanRow(str(s), tuple(range(start, stop)), start, (self.tables[s],), True, SamplingParams(), (0,))
            for s, start, stop in parts
        ]

    def run(self, parts: Sequence[tuple[int, int, int]], layer: int = 1) -> list[torch.Tensor]:
        batch = build_batch(self.rows(parts), self.block_size)
        k = torch.cat([self.keys[s][start:stop] for s, start, stop in parts])
        v = torch.cat([self.values[s][start:stop] for s, start, stop in parts])
        q = torch.cat([self.queries[s][start:stop] for s, start, stop in parts])
        where = batch.groups[0]
        kv_write(self.pool, layer, k, v, where.write_blocks, where.write_offsets)
        out = self.attend(q, batch, layer)
        return list(out.split([stop - start for _, start, stop in parts]))

    def attend(self, q: torch.Tensor, batch: Batch, layer: int) -> torch.Tensor:
        tables = batch.groups[0].tables
        scale = q.shape[-1] ** -0.5
        where = (layer, batch.query_rows, batch.query_positions, tables, batch.active)
        return paged_attention(q, self.pool, *where, scale, self.window, sinks=self.sinks)

    def exact(self, s: int) -> torch.Tensor:
        """softmax(q · kᵀ / sqrt(d) + causal and window mask) · v in float64, for a whole sequence."""
        length, kv_heads, head_dim = self.keys[s].shape
        group = self.heads // kv_heads
        q = self.queries[s].double().transpose(0, 1)
        k = self.keys[s].double().repeat_interleave(group, dim=1).transpose(0, 1)
        v = self.values[s].double().repeat_interleave(group, dim=1).transpose(0, 1)
        scores = q @ k.transpose(1, 2) / head_dim**0.5
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        if self.window:
            behind = torch.ones(length, length, dtype=torch.bool).tril(-self.window)
            scores.masked_fill_(behind, float("-inf"))
        if self.sinks is None:
            return (scores.softmax(-1) @ v).transpose(0, 1)
        sinks = self.sinks.double().view(-1, 1, 1).expand(-1, length, 1)
        return (torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v).transpose(0, 1)


def whole(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(s, 0, length) for s, length in enumerate(lengths)]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80), (2, 1, 128)])
def test_prefill_agrees_with_float64(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    lengths = [1, 7, 64, 65, 130, 300]
    memory = Memory(lengths, heads, kv_heads, head_dim, block_size)
    for s, got in enumerate(memory.run(whole(lengths))):
        # Outputs are averages of values of the order of 1; the online softmax rescales once a tile.
        assert (got - memory.exact(s)).abs().max() < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (8, 2, 128), (1, 1, 16)])
def test_a_row_is_the_same_bits_in_chunks_in_batches_and_alone(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    lengths = [200, 90, 333, 5]
    torch.manual_seed(5)
    memory = Memory(lengths, heads, kv_heads, head_dim, 16)
    reference = memory.run(whole(lengths))
    for s, length in enumerate(lengths):
        assert torch.equal(memory.run([(s, 0, length)])[0], reference[s])
    for chunk in (1, 5, 8, 61):
        chunks = [memory.run([(0, at, min(at + chunk, 200))])[0] for at in range(0, 200, chunk)]
        assert torch.equal(torch.cat(chunks), reference[0]), chunk
    mixed = memory.run([(2, 330, 333), (0, 199, 200), (1, 13, 90)])
    expected = [reference[2][330:], reference[0][199:], reference[1][13:]]
    assert all(torch.equal(got, want) for got, want in zip(mixed, expected, strict=True))


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("height", [0.0, 8.0, -30.0, 80.0])
def test_sinks_take_their_share_of_attention(height: float, window: int) -> None:
    lengths = [1, 64, 130, 300]
    sinks = torch.randn(6) + height
    memory = Memory(lengths, 6, 2, 32, 16, sinks=sinks, window=window)
    reference = memory.run(whole(lengths))
    for s, got in enumerate(reference):
        assert (got - memory.exact(s)).abs().max() < 64 * torch.finfo(torch.float32).eps
    chunks = [memory.run([(3, at, min(at + 61, 300))])[0] for at in range(0, 300, 61)]
    assert torch.equal(torch.cat(chunks), reference[3])
    mixed = memory.run([(2, 129, 130), (3, 290, 300)])
    assert torch.equal(mixed[0], reference[2][129:])
    assert torch.equal(mixed[1], reference[3][290:])


@pytest.mark.parametrize("window", [1, 2, 16, 63, 100])
def test_a_window_hides_what_lies_before_it_and_what_was_given_back_is_not_read(window: int) -> None:
    torch.manual_seed(6)
    memory = Memory([200], 4, 2, 32, 16, window=window)
    (reference,) = memory.run([(0, 0, 200)])
    assert (reference - memory.exact(0)).abs().max() < 64 * torch.finfo(torch.float32).eps
    (table,) = memory.tables
    for start in (15, 16, 17, 79, 80, 128, 199):
        behind = max(0, start - window + 1) // 16
        memory.pool[list(table[:behind])] = float("nan")
        memory.tables[0] = (*[HOLE] * behind, *table[behind:])
        stop = min(start + 9, 200)
        assert torch.equal(memory.run([(0, start, stop)])[0], reference[start:stop]), start


def test_writing_touches_only_its_layer_and_places() -> None:
    memory = Memory([20], 2, 1, 16, 16)
    before = memory.pool.clone()
    memory.run([(0, 17, 20)], layer=0)
    changed = (memory.pool != before) & ~(memory.pool.isnan() & before.isnan())
    block = memory.tables[0][1]
    expected = torch.zeros_like(changed)
    expected[block, 0, :, :, 1:4] = True
    assert torch.equal(changed, expected)
    assert torch.equal(memory.pool[block, 0, 0, 0, 1:4], memory.keys[0][17:20, 0])
    assert torch.equal(memory.pool[block, 0, 1, 0, 1:4], memory.values[0][17:20, 0])


def test_tiles_have_fixed_boundaries_that_blocks_fit() -> None:
    longest = kv_tiles(100_000)
    assert [start for start, _ in longest] == [0, *(stop for _, stop in longest[:-1])]
    assert all(start % 64 == 0 for start, _ in longest)
    for context in (1, 64, 65, 1000, 8192):
        tiles = kv_tiles(context)
        assert tiles == longest[: len(tiles)]
        assert tiles[-1][0] < context <= tiles[-1][1]


def test_pools_take_no_memory_before_they_are_written() -> None:
    import psutil

    before = psutil.Process().memory_info().rss
    layout = KVLayout((KVGroup(tuple(range(30)), 3, 64, torch.float32),), 16)
    pool = layout.allocate(0, 3000)
    assert pool.nbytes == 3000 * layout.block_bytes(0) > 2**31
    assert psutil.Process().memory_info().rss - before < 2**28
    assert float(pool[2999, 29, 1, 2, 15, 63]) == 0.0
