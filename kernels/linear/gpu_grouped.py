"""Products of rows with the matrices of the experts that they chose, in Triton; quantised or dense.

A row's result is bit for bit that of `gpu.multiply` or `gpu_dense.multiply_dense` with its expert's matrix. Programs
find their expert on the device, and there are as many as the shapes may take, so nothing waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from appliance.kernels.linear import gpu, gpu_dense
from appliance.kernels.linear.gpu_block import add_block
from appliance.kernels.linear.gpu_dense import multiply_rows
from appliance.kernels.linear.gpu_matrix import TILE_ROWS, WORDS, GpuMatrix
from appliance.kernels.linear.gpu_split import num_splits

_TILE_ROWS, _WORDS = tl.constexpr(TILE_ROWS), tl.constexpr(WORDS)
# Of a tile of what is gathered.
_COLUMNS = 1024
# Ascending; the last one is repeated. Hopper has another instruction for larger ones, which might add in another order.
TILES = (gpu.Tile(8, 64, 2, 4), gpu.Tile(16, 64, 2, 4), gpu.Tile(32, 32, 2, 3), gpu.Tile(64, 32, 4, 3))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """Quantised matrices [rows, columns] of the same layout, one below the other.

    Attributes:
        matrix: all of them as one, each padded to whole tiles; without `inputs`.
        experts: how many there are.
        rows: of each, without padding.
        inputs: int32 [experts, columns], as `GpuMatrix` has them; or None.
    """

    matrix: GpuMatrix
    experts: int
    rows: int
    inputs: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + (0 if self.inputs is None else self.inputs.nbytes)


def stack(matrices: Sequence[GpuMatrix]) -> ExpertMatrices | None:
    """Matrices of experts as one, copied; None where their layouts differ."""
    first = matrices[0]
    if len({_layout(matrix) for matrix in matrices}) > 1:
        return None
    inputs = None
    if any(matrix.inputs is not None for matrix in matrices):
        own = torch.arange(first.columns, dtype=torch.int32, device=first.codes.device)
        inputs = torch.stack([own if each.inputs is None else each.inputs for each in matrices])

    def below(name: str, dim: int) -> torch.Tensor | None:
        parts = [getattr(matrix, name) for matrix in matrices]
        return None if parts[0] is None else torch.cat(parts, dim)

    metadata = ("scales", "zeros", "biases", "super_scales", "super_biases")
    whole: dict[str, Any] = {"codes": below("codes", 0)} | {name: below(name, 1) for name in metadata}
    rows = len(matrices) * first.codes.shape[0] * TILE_ROWS
    matrix = dataclasses.replace(first, rows=rows, inputs=None, **whole)
    return ExpertMatrices(matrix, len(matrices), first.rows, inputs)


def _layout(matrix: GpuMatrix) -> tuple[object, ...]:
    """What is the same of matrices that can be stacked: numbers, the table, and other tensors' types and shapes."""
    values = {each.name: getattr(matrix, each.name) for each in dataclasses.fields(matrix)}
    values["inputs"] = None
    values["table"] = None if matrix.table is None else tuple(matrix.table.flatten().tolist())
    return tuple(
        (value.dtype, value.shape) if isinstance(value, torch.Tensor) else value for value in values.values()
    )


def multiply_grouped(
    weights: ExpertMatrices | torch.Tensor,
    x: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor,
    top_k: int = 1,
    bias: torch.Tensor | None = None,
) -> None:
    """out[choice] = x[choice // top_k] · Wᵀ + bias, of the expert that was chosen.

    Args:
        weights: quantised ones of E experts, or float16 or bfloat16 [E, N, K], contiguous.
        x: float16 or bfloat16, of dense weights' type, [choices / top_k, K], rows contiguous.
        order, offsets: of `moe.gpu.sort_by_expert`: int64 [choices] and int32 [E + 1].
        out: float16, bfloat16 or float32 [choices, N], rows contiguous.
        top_k: how many choices, one after the other, have the same row of x.
        bias: float32 [E, N], contiguous, or None.
    """
    choices, experts = len(order), len(offsets) - 1
    shape: tuple[int, ...]
    if isinstance(weights, torch.Tensor):
        shape = weights.shape
        assert weights.dtype == x.dtype
        assert weights.is_contiguous()
    else:
        shape = weights.experts, weights.rows, weights.matrix.input_width
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert shape == (experts, out.shape[1], x.shape[1])
    assert (len(x) * top_k, len(out)) == (choices, choices)
    assert x.stride(1) == out.stride(1) == 1
    assert bias is None or (bias.shape == shape[:2] and bias.is_contiguous())
    if choices == 0:
        return
    if isinstance(weights, torch.Tensor):
        _multiply_dense(weights, x, order, offsets, out, top_k, bias)
    else:
        _multiply_quantised(weights, x, order, offsets, out, top_k, bias)


def _multiply_dense(
    weights: torch.Tensor,
    x: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
) -> None:
    experts, rows, width = weights.shape
    tile, splits = gpu_dense.tile_for(-(-len(order) // experts)), gpu_dense.splits_for(rows, width)
    grouped_dense_kernel[_grid(tile, rows, len(order), experts)](
        x,
        weights,
        bias,
        order,
        offsets,
        out,
        rows,
        width,
        x.stride(0),
        out.stride(0),
        splits,
        experts,
        top_k,
        **dense_constants(tile, splits, experts),
        num_warps=tile.warps,
    )


def _multiply_quantised(
    weights: ExpertMatrices,
    x: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
) -> None:
    matrix, experts = weights.matrix, weights.experts
    if weights.inputs is not None:
        x, top_k = _gather(x, weights.inputs, order, offsets, top_k), 1
    assert len(x) * x.stride(0) < gpu.MOST_INPUTS
    zero = 0 if matrix.biases is not None else matrix.zero
    tiles, blocks = matrix.codes.shape[:2]
    tile, splits = gpu_dense.tile_for(-(-len(order) // experts), TILES), num_splits(tiles // experts, blocks)
    sums = None if matrix.biases is None else gpu.run_sums(matrix, x, len(x))
    grouped_kernel[_grid(tile, weights.rows, len(order), experts)](
        x,
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.biases,
        matrix.super_scales,
        matrix.super_biases,
        matrix.table,
        sums,
        bias,
        order,
        offsets,
        out,
        len(x),
        weights.rows,
        matrix.columns,
        blocks,
        0 if sums is None else sums.stride(0),
        matrix.rows,
        x.stride(0),
        out.stride(0),
        splits,
        experts,
        top_k,
        **constants(matrix.bits, matrix.group, matrix.super_group, zero, tile, splits, experts),
        num_warps=tile.warps,
    )


def _grid(tile: gpu.Tile, rows: int, choices: int, experts: int) -> tuple[int, int]:
    """As many programs as there may be tiles: all of them have choices, and all of an expert but one are full."""
    return -(-rows // tile.matrix_rows), min(choices, choices // tile.x_rows + experts)


def constants(
    bits: int, group: int, super_group: int, zero: int, tile: gpu.Tile, splits: int, experts: int
) -> dict[str, int | bool]:
    """What the kernel for quantised matrices is compiled for, and how."""
    scheme = {"BITS": bits, "GROUP": group, "SUPER": super_group, "ZERO": zero}
    # As `gpu.options`.
    return scheme | {"maxnreg": 255, "enable_fp_fusion": False} | dense_constants(tile, splits, experts)


def dense_constants(tile: gpu.Tile, splits: int, experts: int) -> dict[str, int | bool]:
    """What the kernel for dense matrices is compiled for."""
    sizes = {"BM": tile.x_rows, "BN": tile.matrix_rows, "STAGES": tile.stages}
    return sizes | {"SPLIT": splits > 1, "EXPERTS": triton.next_power_of_2(experts)}


def _gather(
    x: torch.Tensor, inputs: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, top_k: int
) -> torch.Tensor:
    """[choices, columns]: what each column of the chosen expert multiplies."""
    experts, columns = inputs.shape
    gathered = x.new_empty(len(order), columns)
    gather_kernel[(len(order), -(-columns // _COLUMNS))](
        x, inputs, order, offsets, gathered, columns, x.stride(0), experts, top_k,
        EXPERTS=triton.next_power_of_2(experts), COLUMNS=_COLUMNS,
    )  # fmt: skip
    return gathered


# The number of rows changes from step to step: nothing is compiled anew for it.
@triton.jit(do_not_specialize=("M",))
def grouped_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    biases_ptr,
    super_scales_ptr,
    super_biases_ptr,
    table_ptr,
    sums_ptr,
    bias_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    M,
    N,
    K,
    blocks,
    padded_m,
    padded_n,
    x_stride,
    out_stride,
    splits,
    experts,
    top_k,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    ZERO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out [choices, N]; program (tile of the matrix, tile of choices).

    Args of the kernel are fields of `GpuMatrix`; `sums_ptr` is float32 [runs, padded_m], of the M rows of x.
    """
    expert, choice, held = _choices_of(order_ptr, offsets_ptr, tl.program_id(1), experts, BM, EXPERTS)
    if expert >= experts:
        return
    n = tl.program_id(0) * BN
    start = expert * (padded_n // experts) + n
    row = start + tl.arange(0, BN)
    words = codes_ptr + (start // _TILE_ROWS).to(tl.int64) * blocks * (_TILE_ROWS * _WORDS)
    words += (row % _TILE_ROWS)[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    # Choices that are not there read a row too, and are not stored.
    m = choice // top_k
    per_split = tl.cdiv(blocks, splits)
    end = per_split
    total, acc = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for block in tl.range(blocks, num_stages=STAGES):
        acc = add_block(
            acc, tl.load(words + block * (_TILE_ROWS * _WORDS)), x_ptr, scales_ptr, zeros_ptr, biases_ptr,
            super_scales_ptr, super_biases_ptr, table_ptr, sums_ptr,
            m, row, block, M, K, padded_m, padded_n, x_stride, BITS, GROUP, SUPER, ZERO, BM, BN,
        )  # fmt: skip
        if SPLIT:
            if block + 1 == end:
                end += per_split
                total += acc
                acc = tl.zeros((BN, BM), tl.float32)
    _store(total + acc if SPLIT else acc, out_ptr, bias_ptr, expert, choice, held, n, N, out_stride, BN)


@triton.jit
def grouped_dense_kernel(
    x_ptr,
    weights_ptr,
    bias_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    out_stride,
    splits,
    experts,
    top_k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """out [choices, N]; program (tile of the matrix, tile of choices)."""
    expert, choice, held = _choices_of(order_ptr, offsets_ptr, tl.program_id(1), experts, BM, EXPERTS)
    if expert >= experts:
        return
    start = tl.program_id(0) * BN
    n = start + tl.arange(0, BN)
    weights = weights_ptr + (expert.to(tl.int64) * N + n) * K
    xs = x_ptr + (choice // top_k).to(tl.int64) * x_stride
    total = multiply_rows(weights, xs, n < N, held, K, 0, splits, BM, BN, STAGES, SPLIT)
    _store(total, out_ptr, bias_ptr, expert, choice, held, start, N, out_stride, BN)


@triton.jit
def _choices_of(order_ptr, offsets_ptr, tile, experts, BM: tl.constexpr, EXPERTS: tl.constexpr):
    """The tile's expert, not below `experts` where there is none; its choices [BM], and whether each is there."""
    each = tl.arange(0, EXPERTS)
    starts = tl.load(offsets_ptr + each, mask=each < experts, other=0)
    ends = tl.load(offsets_ptr + 1 + each, mask=each < experts, other=0)
    tiles = tl.cdiv(ends - starts, BM)
    expert = tl.sum((tl.cumsum(tiles) <= tile).to(tl.int32))
    before = tl.sum(tl.where(each < expert, tiles, 0))
    start = tl.sum(tl.where(each == expert, starts, 0))
    end = tl.sum(tl.where(each == expert, ends, 0))
    place = start + (tile - before) * BM + tl.arange(0, BM)
    held = place < end
    return expert, tl.load(order_ptr + place, mask=held, other=0).to(tl.int32), held


@triton.jit
def _store(total, out_ptr, bias_ptr, expert, choice, held, start, N, out_stride, BN: tl.constexpr):
    """total [BN, choices] and the expert's bias to the choices' rows of out."""
    n = start + tl.arange(0, BN)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0)[:, None]
    target = out_ptr + choice.to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=held[None, :] & (n[:, None] < N))


@triton.jit
def gather_kernel(
    x_ptr, inputs_ptr, order_ptr, offsets_ptr, out_ptr, columns, x_stride, experts, top_k,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [choices, columns]; program (place in the order, tile of columns)."""
    place, each = tl.program_id(0), tl.arange(0, EXPERTS)
    ends = tl.load(offsets_ptr + 1 + each, mask=each < experts, other=0)
    expert = tl.sum(((each < experts) & (ends <= place)).to(tl.int32))
    choice = tl.load(order_ptr + place)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(inputs_ptr + expert * columns + column, mask=column < columns, other=-1)
    x = tl.load(x_ptr + choice // top_k * x_stride + source, mask=source >= 0, other=0.0)
    tl.store(out_ptr + choice * columns + column, x, mask=column < columns)
