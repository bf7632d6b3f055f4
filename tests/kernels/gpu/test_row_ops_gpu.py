"""Row kernels in Triton, interpreted, against the references; what they don't own is left alone."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels import gated_product as products
from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.kv_layout import KVGroup, KVLayout, codes_and_scales
from appliance.kernels.moe import route as route_reference
from appliance.kernels.moe.gpu import combine, route, sort_by_expert
from appliance.kernels.paged_attention import kv_write
from appliance.kernels.qkv.gpu import QKNorm, finish_qkv
from appliance.kernels.rms_norm import rms_norm as norm_reference
from appliance.kernels.rms_norm.gpu import rms_norm
from appliance.kernels.rope import apply_rope, rope_table

# What infinities and what is not a number do in the interpreter's numpy, it says.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = (torch.float16, torch.float32)


def strided(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A poisoned matrix whose rows are apart, inside a poisoned row before and one behind."""
    return torch.full((rows + 2, width + 16), float("nan"), dtype=dtype)[1:-1, :width]


def check_surroundings(out: torch.Tensor) -> None:
    """Every element inside was written, none outside."""
    rows, width = out.shape
    whole = out.as_strided((rows + 2, width + 16), (width + 16, 1), 0)
    assert out.isfinite().all()
    assert int(whole.isnan().sum()) == whole.numel() - out.numel()


def tolerance(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """A rounding to `dtype`, and what float32 sums and exponentials are off."""
    return float(expected.abs().max()) * (torch.finfo(dtype).eps / 2 + 32 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 33, 576, 2880, 4096])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(3, width) * 30).to(dtype), torch.randn(width)
    out = strided(3, width, dtype)
    rms_norm(out, x, weight, 1e-5)
    expected = norm_reference(x.float(), weight, 1e-5)
    assert (out.float() - expected).abs().max() <= tolerance(expected, dtype)
    check_surroundings(out)
    rms_norm(x, x, weight, 1e-5)
    assert torch.equal(x, out)


def test_rms_norm_of_zeros_is_zero_and_of_no_rows_nothing() -> None:
    out = strided(2, 48, torch.float16)
    rms_norm(out, torch.zeros(2, 48, dtype=torch.float16), torch.ones(48), 1e-5)
    assert torch.equal(out, torch.zeros_like(out))
    rms_norm(out[:0], out[:0], torch.ones(48), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1024, 1536])
@pytest.mark.parametrize("activation", products.ACTIVATIONS)
def test_gated_product(activation: str, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([60000.0, -60000.0, 0.0, -88.0])
    gate_up[:, width : width + 2] = 1.0
    out = strided(3, width, dtype)
    gated_product(out, gate_up, activation, 1.702, 7.0)
    wide = gate_up.float()
    expected = {
        "silu": products.silu_mul(wide),
        "gelu": products.gelu_mul(wide),
        "gelu_tanh": products.gelu_tanh_mul(wide),
        "clamped_swiglu": products.clamped_swiglu_mul(wide, 1.702, 7.0),
    }[activation]
    assert ((out.float() - expected).abs() <= tolerance(expected[:, 4:], dtype) + expected.abs() * 1e-3).all()
    check_surroundings(out)


class Heads:
    """Rows of a qkv buffer, and a pool of two layers where they are written, poisoned."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kv: torch.dtype) -> None:
        torch.manual_seed(head_dim + heads)
        self.shape = (heads, kv_heads, head_dim)
        self.qkv = strided(5, (heads + 2 * kv_heads) * head_dim, dtype)
        self.qkv.copy_(torch.randn(self.qkv.shape) * 2)
        layout = KVLayout((KVGroup((0, 1), kv_heads, head_dim, kv),), 16)
        self.pool = layout.view(0, torch.full((4 * layout.block_bytes(0),), 0x7F, dtype=torch.uint8))
        self.q = torch.full((5, heads, head_dim), float("nan"), dtype=dtype)
        self.positions = torch.tensor([0, 1, 63, 17, 40], dtype=torch.int32)
        # The last is a row that a recorded batch doesn't use.
        self.blocks = torch.tensor([3, 3, 0, 2, -1], dtype=torch.int32)
        self.offsets = torch.tensor([0, 1, 15, 1, 5], dtype=torch.int32)

    def run(self, norm: QKNorm | None, rope: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        where = (self.positions, self.blocks, self.offsets)
        finish_qkv(self.q, self.qkv, self.pool, 1, *where, norm, rope)

    def expected(
        self, norm: QKNorm | None, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values by the references, in float32."""
        heads, kv_heads, head_dim = self.shape
        parts = self.qkv.float().view(5, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        q, k, v = (part.contiguous() for part in parts)
        if norm:
            for x, weight in ((q, norm.q_weight), (k, norm.k_weight)):
                flat = x.flatten(1) if norm.whole else x
                x.copy_(norm_reference(flat, weight, norm.eps).view(x.shape))
        if rope:
            for x in (q, k):
                apply_rope(x, *(table[self.positions.long()] for table in rope))
        return q, k, v

    def written(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The pool in float32 after the reference's write, codes by the scales that the kernel has found."""
        before = torch.full((4, 2, 2, self.shape[1], 16, self.shape[2]), 7e7)
        kv_write(before, 1, k[:4], v[:4], self.blocks[:4].long(), self.offsets[:4].long())
        return before


def norm_of(kind: str, heads: int, kv_heads: int, head_dim: int) -> QKNorm | None:
    if kind == "none":
        return None
    sizes = (heads * head_dim, kv_heads * head_dim) if kind == "whole" else (head_dim, head_dim)
    return QKNorm(torch.randn(sizes[0]), torch.randn(sizes[1]), 1e-6, kind == "whole")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "heads", "whole"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"),
    [(9, 3, 64, 64), (1, 1, 16, 16), (8, 1, 80, 32), (2, 2, 96, 96), (2, 1, 256, 0)],
)
def test_finish_qkv(
    heads: int, kv_heads: int, head_dim: int, rotary: int, kind: str, dtype: torch.dtype
) -> None:
    case = Heads(heads, kv_heads, head_dim, dtype, dtype)
    norm = norm_of(kind, heads, kv_heads, head_dim)
    rope = rope_table(64, 10_000.0 ** -(torch.arange(0, rotary, 2) / rotary), 1.1) if rotary else None
    poison = case.pool.clone()
    case.run(norm, rope)
    q, k, v = case.expected(norm, rope)
    assert (case.q.float() - q).abs().max() <= tolerance(q, dtype)
    pool = case.written(k, v)
    ours = pool != 7e7
    assert (case.pool.float() - pool)[ours].abs().max() <= tolerance(torch.cat([k, v]), dtype)
    kind_of_bits = torch.int16 if dtype is torch.float16 else torch.int32
    assert torch.equal(case.pool.view(kind_of_bits)[~ours], poison.view(kind_of_bits)[~ours])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (2, 2, 96), (4, 1, 128)])
def test_int8_keys_and_values_have_a_scale_of_each_token_and_head(
    heads: int, kv_heads: int, head_dim: int
) -> None:
    case = Heads(heads, kv_heads, head_dim, torch.float16, torch.int8)
    case.qkv[1] = 0.0
    case.qkv[3, -1] = float("inf")
    poison = case.pool.clone()
    rope = rope_table(64, 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim), 1.0)
    case.run(None, rope)
    _, k, v = case.expected(None, rope)
    codes, scales = codes_and_scales(case.pool, head_dim)
    untouched = torch.ones(4, 2, 2, kv_heads, 16, dtype=torch.bool)
    for row in range(4):
        at = (case.blocks[row], 1, slice(None), slice(None), case.offsets[row])
        untouched[at] = False
        both = torch.stack([k[row], v[row]])
        step = both.abs().amax(-1) / 127
        if row == 3:
            assert scales[at][1, -1].isnan()
            step[1, -1] = both[1, -1] = codes[at][1, -1] = scales[at][1, -1] = 0
        assert torch.allclose(scales[at], step, rtol=1e-6)
        found = codes[at] * scales[at].unsqueeze(-1)
        assert ((found - both).abs() <= 0.501 * step.unsqueeze(-1)).all()
        assert (codes[at].abs().amax(-1) == torch.where(step > 0, 127, 0)).all()
    before, scales_before = codes_and_scales(poison, head_dim)
    assert torch.equal(codes[untouched], before[untouched])
    assert torch.equal(scales[untouched].view(torch.int32), scales_before[untouched].view(torch.int32))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (32, 4), (5, 5), (60, 4), (3, 1)])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route(experts: int, top_k: int, normalised: bool, dtype: torch.dtype) -> None:
    logits = strided(7, experts, dtype)
    logits.copy_(torch.stack([torch.randperm(experts) * 0.5 - 4 for _ in range(7)]))
    chosen = torch.full((8, top_k), -7, dtype=torch.int32)
    weights = torch.full((8, top_k), float("nan"))
    route(chosen[:7], weights[:7], logits, normalised)
    want, shares = route_reference(logits.float(), top_k, normalised)
    assert torch.equal(chosen[:7].long(), want)
    assert torch.allclose(weights[:7], shares, rtol=1e-5)
    assert (chosen[7] == -7).all()
    assert weights[7].isnan().all()


def test_route_takes_the_first_of_equals_and_names_experts_that_there_are() -> None:
    chosen, weights = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 3)
    route(chosen, weights, torch.tensor([[1.0, 4.0, 4.0, 1.0, 1.0], [float("nan")] * 5]), True)
    assert chosen[0].tolist() == [1, 2, 0]
    assert ((chosen[1] >= 0) & (chosen[1] < 5)).all()
    assert weights[1].isnan().all()


def test_sorting_waits_for_no_value_on_the_device() -> None:
    order, offsets = sort_by_expert(torch.empty(5, 2, dtype=torch.int32, device="meta"), 8)
    assert (order.shape, offsets.shape, offsets.dtype) == ((10,), (9,), torch.int32)


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(0, 4, 2), (1, 8, 2), (33, 5, 3), (16, 128, 8)])
def test_choices_are_sorted_by_expert_and_then_by_row(rows: int, experts: int, top_k: int) -> None:
    chosen = (
        torch.stack([torch.randperm(experts)[:top_k] for _ in range(rows)]) if rows else torch.empty(0, top_k)
    )
    order, offsets = sort_by_expert(chosen.int(), experts)
    assert len(order) == rows * top_k
    for expert in range(experts):
        found = order[offsets[expert] : offsets[expert + 1]]
        assert torch.equal(found, (chosen.flatten() == expert).nonzero().flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "top_k", "width"), [(1, 1, 16), (3, 4, 576), (5, 2, 1030)])
def test_combine_adds_up_what_a_rows_experts_made_of_it(
    rows: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    parts, weights = torch.randn(rows * top_k, width).to(dtype), torch.rand(rows, top_k)
    out = strided(rows, width, dtype)
    combine(out, parts, weights)
    expected = (parts.float().view(rows, top_k, width) * weights.unsqueeze(-1)).sum(1)
    assert (out.float() - expected).abs().max() <= tolerance(expected, dtype)
    check_surroundings(out)
