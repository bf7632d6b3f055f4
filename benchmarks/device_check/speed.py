"""Products and row kernels, their data not in the cache, against the least time for their bytes and operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from random_weights import random_gpu_weight

from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.linear.gpu import multiply
from appliance.kernels.linear.gpu_matrix import TILE_ROWS, WORDS, GpuMatrix, block_columns
from appliance.kernels.rms_norm.gpu import rms_norm
from appliance.quant.gpu_packed import pack_for_gpu
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.parity import short
from benchmarks.device_check.report import Row
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import Call, cold_copies, seconds

_GROUP = 128


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
        dense = torch.randn(rows, columns, device=device).to(sizes.dtypes[-1])
        weights = [dense] + [dense.clone() for _ in range(cold_copies(dense.nbytes, device) - 1)]
        for count in sizes.rows:
            x = torch.randn(count, columns, device=device).to(dense.dtype)
            calls = [_linear(x, weight) for weight in weights]
            num_bytes, flops = dense.nbytes + x.nbytes + 2 * count * rows, 2 * dense.numel() * count
            label = f"{name}, {count} rows, torch, {short(dense.dtype)}"
            yield _row(label, calls, peaks.floor(num_bytes, flops), device, sizes)
    yield from _schemes(device, sizes, peaks)


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
    calls = [_multiplied(matrix, x, out) for matrix in used]
    return _row(label, calls, peaks.floor(num_bytes, flops), device, sizes)


def _multiplied(matrix: GpuMatrix, x: torch.Tensor, out: torch.Tensor) -> Call:
    return lambda: multiply(matrix, x, out=out)


def _linear(x: torch.Tensor, weight: torch.Tensor) -> Call:
    return lambda: torch.nn.functional.linear(x, weight)


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


def row_kernels(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    dtype, hidden, inner = sizes.dtypes[0], sizes.hidden, sizes.intermediate
    weight = torch.ones(hidden, device=device)
    for count in sizes.rows:
        x = torch.randn(count, hidden, device=device)
        calls = [_normed(x.clone(), weight, dtype) for _ in range(cold_copies(x.nbytes, device))]
        yield _row(f"rms_norm, {count} rows", calls, peaks.floor(x.nbytes * 1.5), device, sizes)
        gate_up = torch.randn(count, 2 * inner, device=device).to(dtype)
        calls = [_gated(gate_up.clone()) for _ in range(cold_copies(gate_up.nbytes, device))]
        yield _row(f"silu · up, {count} rows", calls, peaks.floor(gate_up.nbytes * 1.5), device, sizes)


def _normed(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    out = torch.empty_like(x, dtype=dtype)
    return lambda: rms_norm(out, x, weight, 1e-5)


def _gated(gate_up: torch.Tensor) -> Callable[[], None]:
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    return lambda: gated_product(out, gate_up, "silu")
