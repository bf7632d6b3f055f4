"""A product's columns in parts that are computed at the same time: how many, and their sum in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Programs that are enough for every multiprocessor, and blocks that are enough for one.
_ENOUGH_PROGRAMS = 192
_ENOUGH_BLOCKS = 8
_TILE = 1024


def num_splits(tiles: int, blocks: int) -> int:
    """Into how many parts columns are split: of the matrix's shape alone, and so the order of additions."""
    splits = 1
    while tiles * splits < _ENOUGH_PROGRAMS and blocks >= 2 * splits * _ENOUGH_BLOCKS:
        splits *= 2
    return splits


def merge(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The sum of float32 [splits, M, N], contiguous, in their order, and float32 [N], to [M, N]."""
    splits, rows, columns = parts.shape
    merge_kernel[(rows, -(-columns // _TILE))](
        parts, bias, out, rows, columns, splits, out.stride(0), COLUMNS=_TILE
    )


# The number of rows changes from step to step: nothing is compiled anew for it.
@triton.jit(do_not_specialize=("M",))
def merge_kernel(parts_ptr, bias_ptr, out_ptr, M, N, splits, out_stride, COLUMNS: tl.constexpr):
    """Program (row, tile of columns)."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + (m + split * M) * N + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + m * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
