"""Products and row kernels, their data not in the cache, against the least time for their bytes and operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from random_weights import random_gpu_weight

from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.linear.gpu import multiply
from appliance.kernels.linear.gpu_dense import multiply_dense
from appliance.kernels.linear.gpu_grouped import ExpertMatrices
from appliance.kernels.linear.gpu_matrix import TILE_ROWS, WORDS, GpuMatrix, block_columns
from appliance.kernels.moe.gpu import run_experts
from appliance.kernels.rms_norm.gpu import rms_norm
from appliance.quant.gpu_packed import pack_for_gpu
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.report import Row, short
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import Call, cold_copies, seconds

_GROUP = 128
# Of experts.
_CHOICES = 8


def random_matrix(rows: int, columns: int, device: torch.device) -> GpuMatrix:
    """4 bit in groups of 128 with zero points, made where it is; a weight's standard deviation is about 0.02."""
    tiles, blocks = -(-rows // TILE_ROWS), -(-columns // block_columns(4))
    shape, padded = (tiles, blocks, TILE_ROWS, WORDS), tiles * TILE_ROWS
    codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    groups = -(-columns // _GROUP)
    scales = torch.full((-(-groups // 2), padded, 2), 0.004, dtype=torch.float16, device=device)
    zeros = torch.randint(6, 10, (-(-groups // 4), padded, 4), dtype=torch.uint8, device=device)
    nothing = dict.fromkeys(("biases", "super_scales", "super_biases", "table", "inputs"))
    return GpuMatrix(
        rows=rows,
        columns=columns,
        bits=4,
        group=_GROUP,
        zero=0,
        codes=codes,
        scales=scales,
        zeros=zeros,
        super_group=0,
        input_width=columns,
        **nothing,
    )


def products(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    for name, rows, columns in sizes.matrices:
        matrix = random_matrix(rows, columns, device)
        copies = [matrix] + [_copy(matrix) for _ in range(cold_copies(matrix.nbytes, device) - 1)]
        for dtype in sizes.dtypes:
            for count in sizes.rows:
                label = f"{name}, {count} rows, 4 bit g{_GROUP}, {short(dtype)}"
                yield _product(label, copies, count, dtype, device, sizes, peaks)
        yield from _dense(name, rows, columns, sizes.rows, device, sizes, peaks)
    # Of which a step multiplies few rows.
    few = [count for count in sizes.rows if count <= 64]
    yield from _dense("head", sizes.vocab, sizes.hidden, few, device, sizes, peaks)
    yield from _schemes(device, sizes, peaks)
    yield from _experts(device, sizes, peaks)


def _dense(
    name: str,
    rows: int,
    columns: int,
    counts: Sequence[int],
    device: torch.device,
    sizes: Sizes,
    peaks: Peaks,
) -> Iterator[Row]:
    """Products with dense matrices, by our kernel and by torch."""
    dtype = sizes.dtypes[-1]
    weight = torch.randn(rows, columns, dtype=dtype, device=device)
    weights = [weight] + [weight.clone() for _ in range(cold_copies(weight.nbytes, device) - 1)]
    for count in counts:
        x = torch.randn(count, columns, dtype=dtype, device=device)
        out = torch.empty(count, rows, dtype=dtype, device=device)
        floor = peaks.floor(weight.nbytes + x.nbytes + out.nbytes, 2 * weight.numel() * count)
        used = weights if count <= 64 else weights[:2]
        label = f"{name}, {count} rows, {short(dtype)}"
        ours = [partial(multiply_dense, weight, x, out=out) for weight in used]
        yield _row(f"{label}, ours", ours, floor, device, sizes)
        theirs = [partial(torch.nn.functional.linear, x, weight) for weight in used]
        yield _row(f"{label}, torch", theirs, floor, device, sizes)


def _copy(matrix: GpuMatrix) -> GpuMatrix:
    fields = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
    tensors = {name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(matrix, **tensors)


def _product(
    label: str,
    copies: list[GpuMatrix],
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
    peaks: Peaks,
) -> Row:
    rows, columns = copies[0].rows, copies[0].columns
    x = torch.randn(count, columns, device=device).to(dtype)
    out = torch.empty(count, rows, dtype=dtype, device=device)
    num_bytes, flops = copies[0].nbytes + x.nbytes + out.nbytes, 2 * rows * columns * count
    # What is bound by arithmetic needs no more than two.
    used = copies if count <= 64 else copies[:2]
    calls = [partial(multiply, matrix, x, out=out) for matrix in used]
    return _row(label, calls, peaks.floor(num_bytes, flops), device, sizes)


def _row(label: str, calls: list[Call], floor: float | None, device: torch.device, sizes: Sizes) -> Row:
    taken = seconds(calls, device, sizes.repeats)
    return Row(label, taken * 1e6, "µs", None if floor is None else floor * 1e6)


def _schemes(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """Other schemes, decoding, with the last of the matrices' shapes."""
    _, rows, columns = sizes.matrices[-1]
    for scheme in sizes.schemes:
        matrix = pack_for_gpu(random_gpu_weight(scheme, rows, columns, 32), device)
        assert matrix is not None
        copies = [matrix] + [_copy(matrix) for _ in range(cold_copies(matrix.nbytes, device) - 1)]
        for dtype in sizes.dtypes:
            label = f"{scheme} g{matrix.group}, {rows} × {columns}, 1 row, {short(dtype)}"
            yield _product(label, copies, 1, dtype, device, sizes, peaks)


def _experts(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """A mixture's layer behind its router, which chooses at random; never twice the same of a few."""
    count, top_k, width, inner = sizes.experts
    dtype = sizes.dtypes[-1]
    gate_up = ExpertMatrices(random_matrix(count * 2 * inner, width, device), count, 2 * inner, None)
    down = ExpertMatrices(random_matrix(count * width, inner, device), count, width, None)
    turns = _CHOICES if device.type == "cuda" else 1
    one = (gate_up.matrix.nbytes + down.matrix.nbytes) / count
    for rows in sizes.rows:
        x = torch.randn(rows, width, device=device).to(dtype)
        out, weights = torch.empty_like(x), torch.full((rows, top_k), 1 / top_k, device=device)
        calls, num_bytes = [], 0.0
        for _ in range(turns):
            chosen = torch.rand(rows, count, device=device).topk(top_k).indices.int()
            num_bytes += (len(chosen.unique()) * one + x.nbytes + out.nbytes) / turns
            calls.append(partial(run_experts, out, x, chosen, weights, gate_up, down, "silu"))
        floor = peaks.floor(num_bytes, 2 * rows * top_k * 3 * width * inner)
        label = f"{top_k} of {count} experts, {rows} rows, 4 bit g{_GROUP}, {short(dtype)}"
        yield _row(label, calls, floor, device, sizes)


def row_kernels(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    dtype, hidden, inner = sizes.dtypes[0], sizes.hidden, sizes.intermediate
    weight = torch.ones(hidden, device=device)
    for count in sizes.rows:
        x = torch.randn(count, hidden, device=device)
        copies = [x.clone() for _ in range(cold_copies(x.nbytes, device))]
        calls = [partial(rms_norm, torch.empty_like(x, dtype=dtype), x, weight, 1e-5) for x in copies]
        yield _row(f"rms_norm, {count} rows", calls, peaks.floor(x.nbytes * 1.5), device, sizes)
        gate_up = torch.randn(count, 2 * inner, device=device).to(dtype)
        copies = [gate_up.clone() for _ in range(cold_copies(gate_up.nbytes, device))]
        calls = [
            partial(gated_product, gate_up.new_empty(count, inner), gate_up, "silu") for gate_up in copies
        ]
        yield _row(f"silu · up, {count} rows", calls, peaks.floor(gate_up.nbytes * 1.5), device, sizes)
