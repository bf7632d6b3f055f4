"""Paged attention in Triton, interpreted, against the reference, and row by row against itself in other batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from appliance.engine.batch import build_batch
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import HOLE, PlanRow
from appliance.kernels.kv_layout import KVGroup, KVLayout, codes_and_scales
from appliance.kernels.paged_attention import gpu
from appliance.kernels.paged_attention import paged_attention as reference
from appliance.kernels.paged_attention.gpu import paged_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LAYERS, LAYER = 3, 1
Part = tuple[int, int, int]
"""A sequence, and the positions of its first token in the batch and after the last."""


@pytest.fixture(autouse=True)
def _many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes thousands of tokens in earnest, and the interpreter minutes."""
    monkeypatch.setattr(gpu, "SEGMENT", 128)
    monkeypatch.setattr(gpu, "SPLITS", 2)
    monkeypatch.setattr(gpu, "AT_ONCE", 2)


@dataclass(frozen=True)
class Case:
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None


class Memory:
    """Sequences whose keys and values lie in shuffled blocks of a pool that is not a number everywhere else."""

    def __init__(self, case: Case, lengths: Sequence[int], shared_blocks: int = 0) -> None:
        torch.manual_seed(len(lengths))
        self.case = case
        self.heads, self.scale = case.kv_heads * case.group, 2 * case.head_dim**-0.5
        counts = [-(-length // case.block_size) for length in lengths]
        free = random.Random(3).sample(range(sum(counts) + 2), sum(counts) + 2)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        for table in self.tables[1:]:
            table[:shared_blocks] = self.tables[0][:shared_blocks]
        group = KVGroup(tuple(range(LAYERS)), case.kv_heads, case.head_dim, case.kv_dtype or case.dtype)
        layout = KVLayout((group,), case.block_size)
        memory = torch.full(((sum(counts) + 2) * layout.block_bytes(0),), 0xFF, dtype=torch.uint8)
        self.pool = layout.view(0, memory)
        self.queries = [torch.randn(n, self.heads, case.head_dim).to(case.dtype) for n in lengths]
        self.sinks = torch.randn(self.heads) if case.sinks else None
        # What the reference reads: the same numbers in float32, finite everywhere.
        self.exact = torch.zeros(sum(counts) + 2, LAYERS, 2, case.kv_heads, case.block_size, case.head_dim)
        for table, length in zip(self.tables, lengths, strict=True):
            for token in range(length):
                self._write(table[token // case.block_size], token % case.block_size)

    def _write(self, block: int, offset: int) -> None:
        at, of_heads = (block, LAYER, slice(None), slice(None), offset), (2, self.case.kv_heads)
        if self.pool.dtype is not torch.int8:
            self.pool[at] = torch.randn(*of_heads, self.case.head_dim).to(self.pool.dtype)
            self.exact[at] = self.pool[at].float()
        else:
            codes, scales = codes_and_scales(self.pool, self.case.head_dim)
            codes[at] = torch.randint(-127, 128, (*of_heads, self.case.head_dim)).to(torch.int8)
            scales[at] = torch.rand(of_heads) * 0.03
            self.exact[at] = codes[at].float() * scales[at].unsqueeze(-1)

    def run(self, parts: Sequence[Part], empty: int = 0) -> list[torch.Tensor]:
        """Attention of the parts in one batch, with as many empty slots of a row behind them and one without a row."""
        case, rows = self.case, [stop - start for _, start, stop in parts] + [1] * empty + [0]
        tables = torch.full((len(rows), max(map(len, self.tables))), 10**6)
        for table, (s, start, stop) in zip(tables, parts, strict=False):
            count = -(-stop // case.block_size)
            table[:count] = torch.tensor(self.tables[s][:count])
            if case.window:
                table[: max(0, start - case.window + 1) // case.block_size] = HOLE
        # A part of wider rows, and behind them one of no sequence.
        qkv = torch.full((sum(rows) + 1, self.heads + 2, case.head_dim), float("nan"), dtype=case.dtype)
        q, out = qkv[:, : self.heads], torch.full_like(qkv, float("nan"))[:, 1:-1]
        for place, (s, start, stop) in zip(accumulate(rows, initial=0), parts, strict=False):
            q[place : place + stop - start] = self.queries[s][start:stop]
        starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
        contexts = torch.tensor([stop for _, _, stop in parts] + [0] * (empty + 1), dtype=torch.int32)
        options = (self.scale, case.window, case.softcap, self.sinks)
        paged_attention(out, q, self.pool, LAYER, tables.int(), starts, contexts, rows, *options)
        whole = out.as_strided(qkv.shape, qkv.stride(), 0)
        assert int(whole.isnan().sum()) == whole.numel() - out[:-1].numel(), (
            "not what it owns, or not all, was written"
        )
        assert not out[sum(rows) - empty : -1].any(), "an empty slot sees something"
        return list(out[: sum(rows) - empty].split(rows[: len(parts)]))

    def expected(self, s: int, start: int, stop: int) -> torch.Tensor:
        case = self.case
        table = tuple(self.tables[s][: -(-stop // case.block_size)])
        row = PlanRow("r", (0,) * (stop - start), start, (table,), True, SamplingParams(), (0,))
        batch = build_batch([row], case.block_size)
        where = (LAYER, batch.query_rows, batch.query_positions, batch.groups[0].tables, batch.active)
        q = self.queries[s][start:stop].float()
        return reference(q, self.exact, *where, self.scale, case.window, case.softcap, self.sinks)

    def check(self, parts: Sequence[Part], empty: int = 0) -> None:
        """Weights and the result are rounded once each; the errors of weights are independent."""
        eps, largest = torch.finfo(self.case.dtype).eps, float(self.exact[:, LAYER].abs().max())
        # What is summed in float32, the scores bounded by some tens.
        in_float32 = 2.0**-18 * max(1.0, self.case.softcap)
        for got, part in zip(self.run(parts, empty), parts, strict=True):
            assert (got.float() - self.expected(*part)).abs().max() < largest * (eps + in_float32), part


def whole(lengths: Sequence[int]) -> list[Part]:
    return [(s, 0, length) for s, length in enumerate(lengths)]


def last(lengths: Sequence[int], count: int = 1) -> list[Part]:
    return [(s, max(0, length - count), length) for s, length in enumerate(lengths)]


SHAPES = [
    Case(group=1, head_dim=64),
    Case(group=1, head_dim=64, dtype=torch.float32),
    Case(group=2, kv_heads=2, head_dim=96, block_size=32),
    Case(group=3, kv_heads=3, head_dim=64),
    Case(group=4, head_dim=128, block_size=64),
    Case(group=4, head_dim=128, dtype=torch.float32),
    Case(group=5, head_dim=80),
    Case(group=6, head_dim=16),
    Case(group=7, kv_heads=2, head_dim=128),
    Case(group=8, head_dim=256, block_size=32),
    Case(group=20, head_dim=64),
]


def name(case: Case) -> str:
    return f"{case.group}x{case.kv_heads}x{case.head_dim}-{case.dtype}".replace("torch.", "")


@pytest.mark.parametrize("case", SHAPES, ids=name)
def test_decode_agrees_with_the_reference(case: Case) -> None:
    lengths = [1, 64, 270]
    Memory(case, lengths).check(last(lengths), empty=1)


@pytest.mark.parametrize("case", SHAPES, ids=name)
def test_prefill_agrees_with_the_reference(case: Case) -> None:
    lengths = [1, 17, 133]
    Memory(case, lengths).check(whole(lengths), empty=1)


FEATURES = {
    "window of one": Case(window=1),
    "window": Case(window=37, group=3),
    "window over a segment": Case(window=140, block_size=32),
    "cap": Case(softcap=5.0),
    "large cap": Case(softcap=50.0, head_dim=128),
    "sinks": Case(sinks=True, group=4),
    "all": Case(window=40, softcap=8.0, sinks=True, head_dim=96),
    "all in float32": Case(window=40, softcap=8.0, sinks=True, dtype=torch.float32),
    "int8 in float32": Case(kv_dtype=torch.int8, kv_heads=2, dtype=torch.float32),
    "int8": Case(kv_dtype=torch.int8, kv_heads=2),
    "int8, all": Case(kv_dtype=torch.int8, window=40, softcap=8.0, sinks=True, block_size=32),
    "int8 of padded heads": Case(kv_dtype=torch.int8, head_dim=80, group=3),
    "int8 of large heads": Case(kv_dtype=torch.int8, head_dim=256),
}


@pytest.mark.parametrize("case", FEATURES.values(), ids=FEATURES.keys())
def test_windows_caps_sinks_and_codes(case: Case) -> None:
    lengths = [1, 40, 190]
    Memory(case, lengths).check([*last(lengths), (2, 123, 190), (2, 30, 31), (1, 0, 40)])


def test_tables_may_share_blocks() -> None:
    lengths = [64, 70, 33]
    Memory(Case(), lengths, shared_blocks=2).check([*last(lengths), *whole(lengths)])


@pytest.mark.parametrize(
    "case",
    [
        Case(group=3),
        Case(group=4, window=50, softcap=20.0, sinks=True, head_dim=96),
        Case(group=2, kv_dtype=torch.int8, kv_heads=2),
        Case(group=1, head_dim=256, block_size=64),
    ],
    ids=name,
)
def test_a_row_is_the_same_bits_in_chunks_in_batches_and_alone(case: Case) -> None:
    lengths = [150, 90, 5]
    memory = Memory(case, lengths)
    reference = memory.run(whole(lengths))
    assert torch.equal(memory.run([(1, 0, 90)])[0], reference[1])
    chunks = [memory.run([(0, at, min(at + 61, 150))])[0] for at in range(0, 150, 61)]
    assert torch.equal(torch.cat(chunks), reference[0])
    decoded = [(s, at, at + 1) for s, at in ((0, 149), (0, 128), (0, 127), (2, 4), (0, 0), (1, 63))]
    mixed: list[Part] = [*decoded, (1, 13, 90), (0, 126, 130)]
    expected = [reference[s][start:stop] for s, start, stop in mixed]
    assert all(torch.equal(got, want) for got, want in zip(memory.run(mixed, empty=1), expected, strict=True))


def test_sequences_decoded_some_after_the_others_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [150, 5, 90, 16, 33, 128]
    memory = Memory(Case(group=2, kv_heads=2), lengths)
    parts = [*last(lengths, 2), (0, 10, 90)]
    expected = memory.run(parts)
    launches: list[int] = []
    kernel = gpu.merge_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(gpu, "merge_kernel", Counted())
    monkeypatch.setattr(gpu, "SCRATCH_BYTES", 1)
    assert all(torch.equal(got, want) for got, want in zip(memory.run(parts), expected, strict=True))
    assert launches == [4, 4]


def test_no_sequences_are_nothing_to_do() -> None:
    assert Memory(Case(), [5]).run([]) == []
