"""Products with quantised matrices on the GPU, in Triton.

The weights are the left operand of the tensor cores' products, so a batch is padded to no more than 8. A row's result
is added up in an order that depends on the matrix alone: within a group, then the groups of a split, then the splits.
Splits are of the matrix's columns, and computed at the same time where there are few rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from appliance.kernels.linear.gpu_block import add_block
from appliance.kernels.linear.gpu_matrix import TILE_ROWS, WORDS, GpuMatrix
from appliance.kernels.linear.gpu_split import merge, num_splits

# An argument that changes from step to step, for whose values nothing is compiled anew.
_CHANGING = ("M",)
MOST_INPUTS = 2**31
"""Inputs of all rows of x together are fewer: their places have 32 bits."""
_TILE_ROWS, _WORDS = tl.constexpr(TILE_ROWS), tl.constexpr(WORDS)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: outputs of so many rows of x and of the matrix, and with what."""

    x_rows: int
    matrix_rows: int
    warps: int
    stages: int
    splits_inside: bool = False
    """Whether the program goes through all the splits; otherwise they are programs of their own."""


# The first of the smallest that hold all rows of x is taken, unless another of them is measured to be faster; for more
# rows than any holds, the largest that go through all splits. Of these, 64 x 128 reads least from the level-2 cache for
# a multiply-add; with 128 x 128 each of three sums would take 64 registers of a thread, and they would spill.
TILES = (
    Tile(8, 64, 2, 4),
    Tile(8, 64, 2, 6),
    Tile(8, 64, 4, 4),
    Tile(8, 32, 2, 4),
    Tile(16, 64, 2, 4),
    Tile(16, 64, 4, 4),
    Tile(32, 64, 4, 4),
    Tile(32, 64, 2, 4),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 8, 3, splits_inside=True),
    Tile(64, 64, 4, 3, splits_inside=True),
)
# Hopper's groups of four warps multiply 64 rows by an instruction of their own, which might add in another order.
TILES_OF_HOPPER = (
    *(tile for tile in TILES if tile.warps == 2),
    Tile(64, 32, 4, 3, splits_inside=True),
)
_LIKE_HOPPER = (9, 10)


def tiles(major: int, group: int) -> tuple[Tile, ...]:
    """The tiles for matrices with groups of so many columns, on devices of a major compute capability."""
    if major in _LIKE_HOPPER:
        return TILES_OF_HOPPER
    # Eight warps would copy 16 columns of x by 8 bytes, and the many addresses would spill.
    return TILES if group > 16 else tuple(tile for tile in TILES if tile.warps < 8)


def candidates(matrix: GpuMatrix, rows: int) -> tuple[Tile, ...]:
    """The tiles that may multiply so many rows of x, all with the same result; first the usual one."""
    fitting = tiles(_major(matrix.codes.device), matrix.group)
    size = next((tile.x_rows for tile in fitting if tile.x_rows >= rows), fitting[-1].x_rows)
    return tuple(tile for tile in fitting if tile.x_rows == size and (tile.splits_inside or rows <= size))


def tile_for(matrix: GpuMatrix, rows: int) -> Tile:
    """The tile for so many rows of x where nothing was measured."""
    return candidates(matrix, rows)[0]


@functools.cache
def _major(device: torch.device) -> int:
    """0 where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def multiply(
    matrix: GpuMatrix,
    x: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x · Wᵀ + bias.

    Args:
        x: float16 or bfloat16 [M, matrix.input_width], rows contiguous, less than 2^31 apart in all; M may be 0.
        bias: float32 [matrix.rows], or None.
        out: float16, bfloat16 or float32 [M, matrix.rows], rows contiguous; None for a new one of x's type.
        tile: one of `candidates(matrix, M)`, None for the first.

    Returns:
        out.
    """
    rows = len(x)
    out = x.new_empty(rows, matrix.rows) if out is None else out
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert x.shape == (rows, matrix.input_width)
    assert out.shape == (rows, matrix.rows)
    assert x.stride(1) == out.stride(1) == 1
    assert rows * max(x.stride(0), matrix.columns) < MOST_INPUTS
    if rows == 0:
        return out
    tile = tile or tile_for(matrix, rows)
    if matrix.inputs is not None:
        x = _gather(x, matrix.inputs)
    zero = 0 if matrix.biases is not None else matrix.zero
    blocks, splits = matrix.codes.shape[1], num_splits(*matrix.codes.shape[:2])
    sums = None if matrix.biases is None else run_sums(matrix, x, -(-rows // tile.x_rows) * tile.x_rows)
    apart = splits > 1 and not tile.splits_inside
    target = out.new_empty(splits, rows, matrix.rows, dtype=torch.float32) if apart else out
    grid = (-(-matrix.rows // tile.matrix_rows), splits if apart else 1, -(-rows // tile.x_rows))
    product_kernel[grid](
        x,
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.biases,
        matrix.super_scales,
        matrix.super_biases,
        matrix.table,
        sums,
        None if apart else bias,
        target,
        rows,
        matrix.rows,
        matrix.columns,
        blocks,
        0 if sums is None else sums.stride(0),
        matrix.scales.shape[1],
        x.stride(0),
        target.stride(-2),
        splits,
        **options(matrix.bits, matrix.group, matrix.super_group, zero, tile, splits),
    )
    if apart:
        merge(target, bias, out)
    return out


def options(
    bits: int, group: int, super_group: int, zero: int, tile: Tile, splits: int
) -> dict[str, int | bool]:
    """What the kernel of a product is compiled for, and how; of `GpuMatrix`, and of how it is multiplied."""
    return {
        "BITS": bits,
        "GROUP": group,
        "SUPER": super_group,
        "ZERO": zero,
        "BM": tile.x_rows,
        "BN": tile.matrix_rows,
        "STAGES": tile.stages,
        "SPLIT": splits > 1,
        "INSIDE": splits > 1 and tile.splits_inside,
        "num_warps": tile.warps,
        # Shared memory says how many programs fit; for more of them the assembler would spill registers.
        "maxnreg": 255,
        # The same bits, whatever else is compiled with it.
        "enable_fp_fusion": False,
    }


def _gather(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[M, K] → [M, columns]: what each column multiplies."""
    gathered = x.new_empty(len(x), len(inputs))
    columns = 1024
    _gather_columns[(len(x), -(-len(inputs) // columns))](
        x, inputs, gathered, len(inputs), x.stride(0), COLUMNS=columns
    )
    return gathered


def run_sums(matrix: GpuMatrix, x: torch.Tensor, padded_rows: int) -> torch.Tensor:
    """float32 [runs, at least padded_rows]: sums of the columns that share their bias and their block."""
    run = min(matrix.group, matrix.block)
    runs = matrix.codes.shape[1] * (matrix.block // run)
    sums = x.new_empty(runs, -(-padded_rows // 16) * 16, dtype=torch.float32)
    at_once = 2048 // run
    _sum_runs[(len(x), -(-runs // at_once))](
        x, sums, matrix.columns, runs, x.stride(0), sums.stride(0), RUN=run, AT_ONCE=at_once
    )
    return sums


@triton.jit(do_not_specialize=_CHANGING)
def product_kernel(
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
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    ZERO: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """out [M, N], or with splits apart float32 [splits, M, N].

    Args of the kernel are fields of `GpuMatrix`; `sums_ptr` is float32 [runs, padded_m].
    """
    n = tl.program_id(0) * BN
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    row = n + tl.arange(0, BN)
    if BN > _TILE_ROWS:
        # Rows beyond the padded ones, of which nothing is stored, are the first ones again.
        held = row % padded_n
        words = codes_ptr + (held // _TILE_ROWS).to(tl.int64)[:, None] * blocks * (_TILE_ROWS * _WORDS)
    else:
        held = row
        words = codes_ptr + (n // _TILE_ROWS).to(tl.int64) * blocks * (_TILE_ROWS * _WORDS)
    words += (held % _TILE_ROWS)[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    per_split = tl.cdiv(blocks, splits)
    total = tl.zeros((BN, BM), tl.float32)
    # One, but for splits inside.
    for index in range(splits if INSIDE else 1):
        split = index if INSIDE else tl.program_id(1)
        first = split * per_split
        acc = tl.zeros((BN, BM), tl.float32)
        for block in tl.range(first, tl.minimum(first + per_split, blocks), num_stages=STAGES):
            acc = add_block(
                acc, tl.load(words + block * (_TILE_ROWS * _WORDS)), x_ptr, scales_ptr, zeros_ptr, biases_ptr,
                super_scales_ptr, super_biases_ptr, table_ptr, sums_ptr,
                m, held, block, M, K, padded_m, padded_n, x_stride, BITS, GROUP, SUPER, ZERO, BM, BN,
            )  # fmt: skip
        total = total + acc if INSIDE else acc
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row, mask=row < N, other=0.0)[:, None]
    target = out_ptr + m.to(tl.int64)[None, :] * out_stride + row[:, None]
    if SPLIT and not INSIDE:
        target += tl.program_id(1).to(tl.int64) * M * N
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (row[:, None] < N))


@triton.jit
def _gather_columns(x_ptr, inputs_ptr, out_ptr, columns, x_stride, COLUMNS: tl.constexpr):
    """out [M, columns]: of each row of x what `inputs` says, nothing where it is negative."""
    m = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.load(inputs_ptr + column, mask=column < columns, other=-1)
    x = tl.load(x_ptr + m * x_stride + place, mask=place >= 0, other=0.0)
    tl.store(out_ptr + m * columns + column, x, mask=column < columns)


@triton.jit
def _sum_runs(x_ptr, sums_ptr, K, runs, x_stride, sums_stride, RUN: tl.constexpr, AT_ONCE: tl.constexpr):
    """sums float32 [runs, padded M] of RUN columns each of x, the last ones padded with zeros."""
    m = tl.program_id(0)
    run = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    k = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(sums_ptr + run * sums_stride + m, tl.sum(x, 1), mask=run < runs)
