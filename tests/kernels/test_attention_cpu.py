"""Native paged attention against a softmax written out in float64, and against itself in other chunks and calls."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from appliance.kernels.native import forced_isa, library
from appliance.kernels.paged_attention.cpu import (
    QUERY_TOKENS,
    Item,
    KvShape,
    KvType,
    kv_write,
    paged_attention,
)

LIB = library()
pytestmark = pytest.mark.skipif(LIB is None, reason="native library not built")
LAYERS, LAYER = 3, 1
HOLE = -1


def supported(name: str) -> bool:
    try:
        with forced_isa(name):
            return True
    except ValueError:
        return False


ISAS = [n for n in ("portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16") if supported(n)]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_isa(request.param):
        yield request.param


@dataclass(frozen=True)
class Case:
    type: KvType = KvType.bfloat16
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 3
    block_size: int = 32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def shape(self) -> KvShape:
        return KvShape(self.type, self.kv_heads, self.head_dim, self.block_size, LAYERS)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Tokens:
    """A sequence whose keys and values lie in shuffled blocks of a pool that is NaN everywhere else."""

    def __init__(
        self, case: Case, length: int, seed: int = 0, *, damage: tuple[str, int, float] | None = None
    ):
        self.case, self.length = case, length
        self.random = torch.Generator().manual_seed(seed)
        shape = case.shape
        count = -(-length // case.block_size)
        self.table = random.Random(seed).sample(range(count + 2), count)
        # A block before the first, too: what reading a hole would find.
        memory = torch.full(((count + 3) * shape.block_bytes,), 0xFF, dtype=torch.uint8)
        self.pool = memory[shape.block_bytes :]
        self.keys = self._normal(length, case.kv_heads, case.head_dim)
        self.values = self._normal(length, case.kv_heads, case.head_dim)
        self.queries = self._normal(length, case.kv_heads * case.group, case.head_dim)
        self.sinks = self._normal(case.kv_heads * case.group) if case.sinks else None
        if damage:
            name, token, value = damage
            getattr(self, name)[token, 0, case.head_dim // 2] = value
        self.write(0, length)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def write(self, start: int, stop: int) -> None:
        blocks = [self.table[t // self.case.block_size] for t in range(start, stop)]
        offsets = [t % self.case.block_size for t in range(start, stop)]
        new = self.keys[start:stop], self.values[start:stop]
        kv_write(LIB, self.case.shape, self.pool, LAYER, *new, blocks, offsets)

    def item(self, start: int, stop: int, row: int) -> Item:
        """Blocks before the window, which nobody sees, are holes."""
        window, size = self.case.window, self.case.block_size
        seen = max(0, start - window + 1) // size if window else 0
        return Item(row, stop - start, start, [HOLE] * seen + self.table[seen:])

    def attend(
        self, start: int, stop: int, step: int = QUERY_TOKENS, *, in_segments: bool = False
    ) -> torch.Tensor:
        cuts = [(at, min(at + step, stop)) for at in range(start, stop, step)]
        items = [self.item(*cut, cut[0] - start) for cut in cuts]
        c = self.case
        options = (c.scale, c.window, c.softcap, self.sinks)
        q = self.queries[start:stop].contiguous()
        return paged_attention(LIB, c.shape, self.pool, LAYER, q, items, *options, in_segments=in_segments)

    def exact(self, start: int, stop: int) -> torch.Tensor:
        c = self.case
        q = self.queries[start:stop].double().transpose(0, 1)
        k = self.keys.double().repeat_interleave(c.group, dim=1).permute(1, 2, 0)
        v = self.values.double().repeat_interleave(c.group, dim=1).transpose(0, 1)
        scores = q @ k * c.scale
        if c.softcap:
            scores = torch.tanh(scores / c.softcap) * c.softcap
        position, token = torch.arange(start, stop).unsqueeze(1), torch.arange(self.length)
        hidden = token > position
        if c.window:
            hidden |= token <= position - c.window
        scores.masked_fill_(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double().view(-1, 1, 1).expand(-1, stop - start, 1)
            weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[..., :-1]
        else:
            weights = scores.softmax(dim=2)
        return (weights @ v).transpose(0, 1)


# Share of the largest query, key or value by which one of them is rounded. float32: what summing adds; the softmax's
# exponentials are good to a few units, too.
STEP = {KvType.float32: 2.0**-21, KvType.bfloat16: 2.0**-8, KvType.int8: 0.5 / 127}


def tolerance(s: Tokens) -> float:
    """Roundings are independent: a score's error is that of head_dim products, and shifts weights by that share."""
    step, c = STEP[s.case.type], s.case
    largest = float(max(s.keys.abs().max(), s.queries.abs().max(), s.values.abs().max()))
    roundings = step * largest if c.type is KvType.int8 else step * 1.0
    # Queries and keys: each product errs by two steps of about one standard deviation; five of their sum's.
    score = 5.0 * roundings * 2.0**0.5 * c.head_dim**0.5 * c.scale
    return (score + 2.0 * step + 2.0**-20 * max(1.0, c.softcap)) * largest


def check(s: Tokens, start: int, stop: int) -> None:
    torch.testing.assert_close(
        s.attend(start, stop).double(), s.exact(start, stop), rtol=0, atol=tolerance(s)
    )


def sample(count: int) -> list[tuple[Case, int]]:
    pick = random.Random(7).choice
    return [
        (
            Case(
                type=pick(list(KvType)),
                head_dim=pick([8, 16, 40, 64, 80, 128, 256]),
                kv_heads=pick([1, 2]),
                group=pick([1, 2, 3, 5, 8]),
                block_size=pick([16, 32, 64]),
                window=pick([0, 0, 1, 17, 100, 256, 300]),
                softcap=pick([0.0, 0.0, 2.0, 50.0]),
                sinks=pick([False, True]),
            ),
            pick([1, 15, 16, 17, 128, 129, 255, 256, 257, 1000]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("case", "length"), sample(60))
def test_equals_the_softmax_written_out(case: Case, length: int) -> None:
    s = Tokens(case, length)
    check(s, max(0, length - 40), length)


@pytest.mark.parametrize("type", list(KvType))
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (30, False), (300, True), (256, False)])
def test_no_bit_depends_on_chunks_tiles_or_segments(type: KvType, window: int, sinks: bool) -> None:
    case = Case(type=type, window=window, sinks=sinks, head_dim=40, group=5)
    s = Tokens(case, 600)
    whole = s.attend(200, 600)
    assert torch.equal(whole, s.attend(200, 600, step=1))
    assert torch.equal(whole, s.attend(200, 600, step=7))
    assert torch.equal(whole, s.attend(200, 600, in_segments=True))


@pytest.mark.parametrize("type", list(KvType))
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["keys", "queries"])
def test_what_is_not_finite_shows_and_only_where_it_is_seen(
    type: KvType, softcap: float, value: float, name: str
) -> None:
    case = Case(type=type, softcap=softcap, group=1)
    hurt, well = Tokens(case, 300, damage=(name, 70, value)), Tokens(case, 300)
    got, expected = hurt.attend(0, 300), well.attend(0, 300)
    seen = slice(70, 300) if name == "keys" else slice(70, 71)
    assert not got[seen, 0].isfinite().any()
    unhurt = torch.ones(300, case.kv_heads, dtype=torch.bool)
    unhurt[seen, 0] = False
    assert torch.equal(got[unhurt], expected[unhurt])


@pytest.mark.parametrize("type", list(KvType))
def test_sizes_are_those_of_the_kernels(type: KvType) -> None:
    shape = Case(type=type, head_dim=40, block_size=64).shape
    native = shape.native()
    LIB.appliance_kv_block_bytes.restype = LIB.appliance_kv_tile_bytes.restype = ctypes.c_int64
    assert LIB.appliance_kv_tile_bytes(ctypes.byref(native)) == shape.tile_bytes
    assert LIB.appliance_kv_block_bytes(ctypes.byref(native)) == shape.block_bytes


def test_a_block_is_as_large_as_its_numbers() -> None:
    assert KvShape(KvType.float32, 3, 40, 32, 2).block_bytes == 2 * 3 * 2 * 32 * 48 * 4
    assert KvShape(KvType.bfloat16, 3, 64, 32, 2).block_bytes == 2 * 3 * 2 * 32 * 64 * 2
    assert KvShape(KvType.int8, 3, 64, 32, 2).block_bytes == 2 * 3 * 2 * 32 * (64 + 4)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "named"), [(8, 64, "block_size is 8"), (16, 1024, "head_dim is 1024")]
)
def test_refuses_what_kernels_cannot_do(block_size: int, head_dim: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KvShape(KvType.bfloat16, 1, head_dim, block_size, 1)
