"""Products with dense matrices on the GPU, in Triton.

Libraries choose a kernel, and with it an order of additions, by the batch's size. Here, as with quantised matrices, a
row's result depends on the row and the matrix alone: columns are added up in blocks of 64, one after the other, in
splits that the matrix's shape decides, and then the splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from appliance.kernels.linear.gpu import Tile
from appliance.kernels.linear.gpu_split import merge, num_splits

BLOCK = 64
"""Columns of a step."""

# Ascending; the last one is repeated. All of them are what Hopper makes products of its own kind of, as 8 rows are not:
# so that there, too, additions are the same in each.
TILES = (
    Tile(16, 64, 4, 4),
    Tile(32, 64, 4, 4),
    Tile(64, 64, 4, 4, splits_inside=True),
    Tile(128, 64, 8, 3, splits_inside=True),
)
_BLOCK = tl.constexpr(BLOCK)
# The interpreter's products of bfloat16 are wrong, those of float32 are exact before they are added up.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def tile_for(rows: int, tiles: tuple[Tile, ...] = TILES) -> Tile:
    """The least tile that holds so many rows of x."""
    return next((tile for tile in tiles if tile.x_rows >= rows), tiles[-1])


def splits_for(rows: int, columns: int) -> int:
    """Into how many parts the columns of a matrix [rows, columns] are split."""
    return num_splits(-(-rows // TILES[0].matrix_rows), -(-columns // BLOCK))


def multiply_dense(
    weight: torch.Tensor,
    x: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x · Wᵀ + bias.

    Args:
        weight: float16 or bfloat16 [N, K], contiguous.
        x: [M, K] of the same type, rows contiguous; M may be 0.
        bias: float32 [N], or None.
        out: float16, bfloat16 or float32 [M, N], rows contiguous; None for a new one of x's type.
        tile: None for the least of `TILES` that holds M.

    Returns:
        out.
    """
    (columns, width), rows = weight.shape, len(x)
    out = x.new_empty(rows, columns) if out is None else out
    assert x.dtype == weight.dtype
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert weight.is_contiguous()
    assert x.shape == (rows, width)
    assert out.shape == (rows, columns)
    assert x.stride(1) == out.stride(1) == 1
    if rows == 0:
        return out
    tile = tile or tile_for(rows)
    splits = splits_for(columns, width)
    apart = splits > 1 and not tile.splits_inside
    target = out.new_empty(splits, rows, columns, dtype=torch.float32) if apart else out
    grid = (-(-rows // tile.x_rows), -(-columns // tile.matrix_rows), splits if apart else 1)
    dense_kernel[grid](
        x,
        weight,
        None if apart else bias,
        target,
        rows,
        columns,
        width,
        x.stride(0),
        target.stride(-2),
        splits,
        **constants(tile, splits),
        num_warps=tile.warps,
    )
    if apart:
        merge(target, bias, out)
    return out


def constants(tile: Tile, splits: int) -> dict[str, int | bool]:
    """What the kernel of a product is compiled for."""
    return {
        "BM": tile.x_rows,
        "BN": tile.matrix_rows,
        "STAGES": tile.stages,
        "SPLIT": splits > 1,
        "INSIDE": splits > 1 and tile.splits_inside,
    }


# The number of rows changes from step to step: nothing is compiled anew for it.
@triton.jit(do_not_specialize=("M",))
def dense_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    out_stride,
    splits,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """out [M, N], or with splits apart float32 [splits, M, N].

    Program (tile of x, tile of the matrix, split): those that are next to each other read the same weights.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = multiply_rows(
        weight_ptr + n.to(tl.int64) * K, x_ptr + m.to(tl.int64) * x_stride, n < N, m < M,
        K, tl.program_id(2), splits, BM, BN, STAGES, INSIDE,
    )  # fmt: skip
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None]
    target = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    if SPLIT and not INSIDE:
        target += tl.program_id(2).to(tl.int64) * M * N
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def multiply_rows(
    weights, xs, of_weights, of_x, K, split, splits,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BM]: rows at `weights` [BN] times rows at `xs` [BM], in one of the splits or all of them.

    Rows that are not there, as `of_weights` and `of_x` say, are zeros.
    """
    blocks = tl.cdiv(K, _BLOCK)
    per_split = tl.cdiv(blocks, splits)
    first = 0 if INSIDE else split * per_split
    last = blocks if INSIDE else tl.minimum(first + per_split, blocks)
    end = first + per_split
    total, acc = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * _BLOCK + tl.arange(0, _BLOCK)
        held = k < K
        weight = tl.load(weights[:, None] + k[None, :], mask=of_weights[:, None] & held[None, :], other=0.0)
        x = tl.load(xs[None, :] + k[:, None], mask=of_x[None, :] & held[:, None], other=0.0)
        if _INTERPRETED:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, x, acc)
        if INSIDE:
            if block + 1 == end:
                end += per_split
                total += acc
                acc = tl.zeros((BN, BM), tl.float32)
    return total + acc if INSIDE else acc
