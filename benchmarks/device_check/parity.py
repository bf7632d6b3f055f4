"""Products and row kernels against float64: fresh inputs, poisoned outputs, and a look at what lies beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from random_weights import random_gpu_weight

from appliance.engine.sampler import sample
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow
from appliance.kernels import gated_product as products
from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.kv_layout import KVGroup, KVLayout, codes_and_scales
from appliance.kernels.linear.gpu import multiply
from appliance.kernels.linear.gpu_dense import multiply_dense
from appliance.kernels.linear.gpu_grouped import stack
from appliance.kernels.moe import route as route_reference
from appliance.kernels.moe import run_experts as run_reference
from appliance.kernels.moe.gpu import route, run_experts
from appliance.kernels.qkv.gpu import QKNorm, finish_qkv
from appliance.kernels.rms_norm import rms_norm as norm_reference
from appliance.kernels.rms_norm.gpu import rms_norm
from appliance.kernels.rope import apply_rope, rope_table
from appliance.quant.gpu_packed import pack_for_gpu
from benchmarks.device_check.report import Row, error, short
from benchmarks.device_check.sizes import Sizes

_EPS32 = torch.finfo(torch.float32).eps
# Of a row, behind it: a pitch of whole 16 bytes, as the executor's buffers have.
_BESIDE = 16


def poisoned(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, columns] of NaNs, within more of them."""
    whole = torch.full((rows + 2, columns + _BESIDE), math.nan, dtype=dtype, device=device)
    return whole[1:-1, :columns]


def strayed(out: torch.Tensor) -> int:
    """How many elements of `poisoned` are not written, or lie beside it and are."""
    rows, columns = out.shape
    whole = out.as_strided((rows + 2, columns + _BESIDE), (columns + _BESIDE, 1), 0)
    inside = int(out.isnan().sum())
    return inside + whole.numel() - out.numel() - (int(whole.isnan().sum()) - inside)


def worst(found: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor | float) -> float:
    """The largest error as a share of the tolerance; infinite where something is not a number."""
    return float(((found.double() - expected).abs() / tolerance).nan_to_num(math.inf).max())


def rounding(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """The tolerance of one rounding to `dtype`, and of what sums and exponentials in float32 are off."""
    return float(expected.abs().max()) * (torch.finfo(dtype).eps / 2 + 32 * _EPS32)


def products_parity(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    rows, columns = sizes.matrix
    for name in sizes.schemes:
        weight = random_gpu_weight(name, rows, columns, 128)
        matrix = pack_for_gpu(weight, device)
        assert matrix is not None
        exact = weight.dequantize().to(device, torch.float64)
        scales = weight.scales.double().abs().amax(1) * (1 if weight.sub_scales is None else 128)
        # What is added up is as large as the largest code times its scale, whatever is taken off.
        largest = exact.abs().amax(1) + 255 * scales.to(device)
        yield from _product(name, partial(multiply, matrix), exact, largest, sizes, dtype)
    dense = torch.randn(rows, columns, device=device).to(dtype)
    exact = dense.double()
    yield from _product("dense", partial(multiply_dense, dense), exact, exact.abs().amax(1), sizes, dtype)


def _product(
    name: str,
    multiplied: Callable[..., torch.Tensor],
    exact: torch.Tensor,
    largest: torch.Tensor,
    sizes: Sizes,
    dtype: torch.dtype,
) -> Iterator[Row]:
    """A product with the matrix `exact`, the largest terms of whose rows are `largest`."""
    (rows, columns), counts, device = exact.shape, sizes.matrix_rows, exact.device
    bias = torch.randn(rows, device=device)
    x = poisoned(max(counts), columns, dtype, device).copy_(torch.randn(max(counts), columns))
    expected = x.double() @ exact.t() + bias
    tolerance = 2 * _EPS32 * columns**0.5 * x.double().abs().sum(1, keepdim=True) * largest
    found, different, beside = 0.0, 0, 0
    alone = multiplied(x[:1], bias=bias, out=poisoned(1, rows, torch.float32, device))
    for count in counts:
        out = multiplied(x[:count], bias=bias, out=poisoned(count, rows, torch.float32, device))
        found = max(found, worst(out, expected[:count], tolerance[:count]))
        different += int((out[:1] != alone).sum())
        beside += strayed(out)
    yield error(name, found)
    yield error(f"{name}: beside the output, or not written", beside, "elements", 0.0)
    # The interpreter's products add in another order in another shape.
    if device.type == "cuda":
        yield error(f"{name}: the first row, in batches of {counts}", different, "other", 0.0)


def rows_parity(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    yield from _row_kernels(device, sizes, dtype)
    for kv_dtype in (dtype, torch.int8):
        yield from _finish_qkv(device, sizes, dtype, kv_dtype)
    yield from _experts(device, sizes, dtype)
    yield _sampling(device, sizes)


def _row_kernels(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    width, rows = sizes.hidden, max(sizes.matrix_rows)
    x = poisoned(rows, width, dtype, device).copy_(torch.randn(rows, width) * 30)
    weight = torch.randn(width, device=device)
    out = poisoned(rows, width, dtype, device)
    rms_norm(out, x, weight, 1e-5)
    expected = norm_reference(x.double(), weight.double(), 1e-5)
    yield error("rms_norm", worst(out, expected, rounding(expected, dtype)))
    yield error("rms_norm: beside the output", strayed(out), "elements", 0.0)
    references = (products.silu_mul, products.gelu_mul, products.gelu_tanh_mul)
    gate_up = poisoned(rows, 2 * width, dtype, device).copy_(torch.randn(rows, 2 * width) * 4)
    for name, reference in zip(products.ACTIVATIONS, references, strict=False):
        out = poisoned(rows, width, dtype, device)
        gated_product(out, gate_up, name)
        expected = reference(gate_up.double())
        tolerance = rounding(expected, dtype) + expected.abs() * 1e-3
        yield error(f"{name}", worst(out, expected, tolerance))
        yield error(f"{name}: beside the output", strayed(out), "elements", 0.0)


def _finish_qkv(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Iterator[Row]:
    """With norms of heads and rotation; each row writes into a block of its own."""
    kv_heads, head_dim, rows = sizes.kv_heads, sizes.head_dim, max(sizes.matrix_rows)
    heads = kv_heads * sizes.group
    width = (heads + 2 * kv_heads) * head_dim
    qkv = poisoned(rows, width, dtype, device).copy_(torch.randn(rows, width) * 2)
    layout = KVLayout((KVGroup((0, 1), kv_heads, head_dim, kv_dtype),), 16)
    memory = torch.full((rows * layout.block_bytes(0),), 0xFF, dtype=torch.uint8, device=device)
    pool, before = layout.view(0, memory), layout.view(0, memory.clone())
    norm = QKNorm(torch.randn(head_dim, device=device), torch.randn(head_dim, device=device), 1e-6, False)
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    rope = tuple(table.to(device) for table in rope_table(rows + 7, frequencies, 1.0))
    positions = (torch.randperm(rows) + 7).to(device, torch.int32)
    blocks = torch.randperm(rows).to(device, torch.int32)
    queries = torch.full((rows, heads, head_dim), math.nan, dtype=dtype, device=device)
    finish_qkv(queries, qkv, pool, 1, positions, blocks, positions % 16, norm, rope)
    q, k, v = qkv.double().view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q, k = (norm_reference(x, w.double(), 1e-6) for x, w in ((q, norm.q_weight), (k, norm.k_weight)))
    for x in (q, k):
        apply_rope(x, *(table[positions.long()].double() for table in rope))
    label = f"norms, rope and write, {short(kv_dtype)} KV"
    yield error(f"{label}: queries", worst(queries, q, rounding(q, dtype)))
    at = (blocks.long(), 1, slice(None), slice(None), (positions % 16).long())
    both = torch.stack([k, v], dim=1)
    if kv_dtype is torch.int8:
        codes, scales = codes_and_scales(pool, head_dim)
        found = codes[at].double() * scales[at].double().unsqueeze(-1)
        tolerance = 0.51 * both.abs().amax(-1, keepdim=True) / 127
    else:
        found, tolerance = pool[at], rounding(both, kv_dtype)
    yield error(f"{label}: keys and values", worst(found, both, tolerance))
    changed = (pool.view(torch.uint8) != before.view(torch.uint8))[:, 0]
    yield error(f"{label}: in another layer", int(changed.sum()), "bytes", 0.0)


def _experts(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    rows, experts, top_k, width, inner = max(sizes.matrix_rows), 8, 2, 128, 64
    logits = torch.stack([torch.randperm(experts) * 0.5 - 4 for _ in range(rows)]).to(device)
    chosen = torch.full((rows, top_k), -7, dtype=torch.int32, device=device)
    weights = torch.full((rows, top_k), math.nan, device=device)
    route(chosen, weights, logits, True)
    which, shares = route_reference(logits.double(), top_k, True)
    yield error("routing: choices", int((chosen != which).sum()), "other", 0.0)
    yield error("routing: weights", worst(weights, shares.double(), 1e-5))
    gate_ups = [random_gpu_weight("zp4", 2 * inner, width, 32) for _ in range(experts)]
    downs = [random_gpu_weight("zp4", width, inner, 32) for _ in range(experts)]
    matrices = [stack([pack_for_gpu(each, device) for each in some]) for some in (gate_ups, downs)]
    x = poisoned(rows, width, dtype, device).copy_(torch.randn(rows, width) * 2**-8)
    out = poisoned(rows, width, dtype, device)
    run_experts(out, x, chosen, weights, *matrices, "silu")

    def run(expert: int, some: torch.Tensor) -> torch.Tensor:
        gate_up, down = (each[expert].dequantize().to(device).double() for each in (gate_ups, downs))
        return products.silu_mul(some @ gate_up.t()) @ down.t()

    expected = run_reference(x.double(), which, shares, run)
    # What is between the products is rounded twice, and the errors are independent.
    yield error("experts", worst(out, expected, 4 * torch.finfo(dtype).eps * float(expected.abs().max())))
    yield error("experts: beside the output", strayed(out), "elements", 0.0)


def _sampling(device: torch.device, sizes: Sizes) -> Row:
    """What the CPU draws of the same logits."""
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=40),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.2, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=0.95, top_k=50, logit_bias={3: 5.0}),
    ]
    rows = [
        PlanRow(f"{seed}", (1,), 10 + seed, ((0,),), True, sampling, (seed,))
        for sampling in settings
        for seed in range(4)
    ]
    logits = torch.randn(len(rows), sizes.vocab) * 3
    here, _ = sample(logits.clone(), rows)
    there, finite = sample(logits.to(device), rows)
    other = int((there.cpu() != here).sum()) + int((~finite).sum())
    return error(f"sampling of {len(rows)} rows", other, "other ids", 0.0)
