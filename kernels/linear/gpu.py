"""Products with quantised matrices on the GPU, in Triton.

The weights are the left operand of the tensor cores' products, so a batch is padded to no more than 8. Codes become
16-bit floats by their bits alone, whole numbers that are exact; a product of one group is multiplied by the group's
scale where it was added up, in float32. So what a weight is worth is never rounded.

A row's result is added up in an order that depends on the matrix alone: within a group, then the groups of a split,
then the splits. Splits are of the matrix's columns, run at the same time where there are few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from appliance.kernels.linear.gpu_matrix import TILE_ROWS, GpuMatrix

# Inline assembly is not interpreted and the interpreter's bfloat16 is wrong: both have twins.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Programs that are enough for every multiprocessor, and blocks that are enough for one.
_ENOUGH_PROGRAMS = 192
_ENOUGH_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: a tile of outputs of so many rows of x and of the matrix, and with what."""

    x_rows: int
    matrix_rows: int
    warps: int
    stages: int
    splits_inside: bool = False
    """Whether the program goes through all the splits; otherwise they are programs of their own."""


# Ascending; the last one is repeated. One for every device, until they are measured.
TILES = (
    Tile(8, 64, 2, 4),
    Tile(16, 64, 2, 4),
    Tile(32, 64, 2, 4),
    Tile(64, 64, 4, 3, splits_inside=True),
    Tile(128, 64, 8, 3, splits_inside=True),
)


def tile_for(rows: int) -> Tile:
    """The tile for so many rows of x."""
    return next((tile for tile in TILES if tile.x_rows >= rows), TILES[-1])


def num_splits(matrix: GpuMatrix) -> int:
    """Into how many parts a product's columns are split: of the matrix's shape alone, and so the order of additions."""
    tiles, blocks = matrix.codes.shape[:2]
    splits = 1
    while tiles * splits < _ENOUGH_PROGRAMS and blocks >= 2 * splits * _ENOUGH_BLOCKS:
        splits *= 2
    return splits


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
        x: float16 or bfloat16 [M, matrix.input_width], rows contiguous; M may be 0.
        bias: float32 [matrix.rows], or None.
        out: float16, bfloat16 or float32 [M, matrix.rows], rows contiguous; None for a new one of x's type.
        tile: None for `tile_for(M)`.

    Returns:
        out.
    """
    rows = len(x)
    out = x.new_empty(rows, matrix.rows) if out is None else out
    assert x.dtype in (torch.float16, torch.bfloat16)
    assert x.shape == (rows, matrix.input_width)
    assert out.shape == (rows, matrix.rows)
    assert x.stride(1) == out.stride(1) == 1
    if rows == 0:
        return out
    tile = tile or tile_for(rows)
    if matrix.inputs is not None:
        x = _gather(x, matrix.inputs)
    blocks, splits = matrix.codes.shape[1], num_splits(matrix)
    apart = splits > 1 and not tile.splits_inside
    target = out.new_empty(splits, rows, matrix.rows, dtype=torch.float32) if apart else out
    grid = (-(-matrix.rows // tile.matrix_rows), splits if apart else 1, -(-rows // tile.x_rows))
    _multiply[grid](
        x,
        matrix.codes,
        matrix.scales,
        matrix.zeros,
        matrix.biases,
        matrix.super_scales,
        matrix.super_biases,
        matrix.table,
        None if matrix.biases is None else _run_sums(matrix, x),
        None if apart else bias,
        target,
        rows,
        matrix.rows,
        matrix.columns,
        blocks,
        matrix.scales.shape[1],
        x.stride(0),
        target.stride(-2),
        splits,
        **constants(matrix, tile, splits),
        num_warps=tile.warps,
    )
    if apart:
        columns = 1024
        _merge[(rows, -(-matrix.rows // columns))](
            target, bias, out, rows, matrix.rows, splits, out.stride(0), COLUMNS=columns
        )
    return out


def constants(matrix: GpuMatrix, tile: Tile, splits: int) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "BITS": matrix.bits,
        "GROUP": matrix.group,
        "SUPER": matrix.super_group,
        "ZERO": 0 if matrix.biases is not None else matrix.zero,
        "BM": tile.x_rows,
        "BN": tile.matrix_rows,
        "STAGES": tile.stages,
        "SPLIT": splits > 1,
        "INSIDE": splits > 1 and tile.splits_inside,
    }


def _gather(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """[M, K] → [M, columns]: what each column multiplies."""
    gathered = x.new_empty(len(x), len(inputs))
    columns = 1024
    _gather_columns[(len(x), -(-len(inputs) // columns))](
        x, inputs, gathered, len(inputs), x.stride(0), COLUMNS=columns
    )
    return gathered


def _run_sums(matrix: GpuMatrix, x: torch.Tensor) -> torch.Tensor:
    """float32 [M, runs]: sums of the columns that share their bias and their block."""
    run = min(matrix.group, matrix.block)
    runs = matrix.codes.shape[1] * (matrix.block // run)
    sums = x.new_empty(len(x), runs, dtype=torch.float32)
    at_once = 2048 // run
    _sum_runs[(len(x), -(-runs // at_once))](
        x, sums, matrix.columns, runs, x.stride(0), RUN=run, AT_ONCE=at_once
    )
    return sums


@triton.jit
def _multiply(
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

    Args of the kernel are fields of `GpuMatrix`; `sums_ptr` is float32 [M, runs].
    """
    n = tl.program_id(0) * BN
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    row = n + tl.arange(0, BN)
    tile_rows: tl.constexpr = 64
    words = codes_ptr + (n // tile_rows).to(tl.int64) * blocks * (tile_rows * 16)
    words += (row % tile_rows)[:, None] * 16 + tl.arange(0, 16)[None, :]
    per_split = tl.cdiv(blocks, splits)
    total = tl.zeros((BN, BM), tl.float32)
    # One, but for splits inside.
    for index in range(splits if INSIDE else 1):
        split = index if INSIDE else tl.program_id(1)
        first = split * per_split
        acc = tl.zeros((BN, BM), tl.float32)
        for block in tl.range(first, tl.minimum(first + per_split, blocks), num_stages=STAGES):
            acc = _add_block(
                acc, tl.load(words + block * (tile_rows * 16)), x_ptr, scales_ptr, zeros_ptr, biases_ptr,
                super_scales_ptr, super_biases_ptr, table_ptr, sums_ptr,
                m, row, block, M, K, blocks, padded_n, x_stride, BITS, GROUP, SUPER, ZERO, BM, BN,
            )  # fmt: skip
        total = total + acc if INSIDE else acc
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row, mask=row < N, other=0.0)[:, None]
    target = out_ptr + m.to(tl.int64)[None, :] * out_stride + row[:, None]
    if SPLIT and not INSIDE:
        target += tl.program_id(1).to(tl.int64) * M * N
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (row[:, None] < N))


@triton.jit
def _add_block(
    acc, words, x_ptr, scales_ptr, zeros_ptr, biases_ptr, super_scales_ptr, super_biases_ptr, table_ptr, sums_ptr,
    m, row, block, M, K, blocks, padded_n, x_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] and the products of one block's columns, whose words are [BN, 16]."""
    BLOCK: tl.constexpr = 512 // BITS
    # Columns of a block with the same metadata, and those of them that one product takes.
    RUN: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK
    RUNS: tl.constexpr = BLOCK // RUN
    BLOCKS: tl.constexpr = GROUP // RUN
    STEP: tl.constexpr = RUN if RUN < 32 or table_ptr is None else 32
    halves = (words, words)
    if RUN == 16:
        halves = tl.split(tl.permute(tl.reshape(words, (BN, 2, 8)), (0, 2, 1)))
    if SUPER:
        super_scale = _of_group(super_scales_ptr, block, 0, 1, SUPER // BLOCK, padded_n, row).to(tl.float32)
        if super_biases_ptr is not None:
            super_bias = _of_group(super_biases_ptr, block, 0, 1, SUPER // BLOCK, padded_n, row).to(tl.float32)
    for run in tl.static_range(RUNS):
        if zeros_ptr is not None:
            zero = _of_group(zeros_ptr, block, run, RUNS, BLOCKS, padded_n, row)
        else:
            zero = tl.full((1,), ZERO, tl.int32)
        part = tl.zeros((BN, BM), tl.float32)
        for step in tl.static_range(RUN // STEP):
            weights = _unpack(
                halves[run % 2 if RUN == 16 else 0], zero, table_ptr, (run * RUN + step * STEP) // 32,
                BITS, BN, STEP, x_ptr.dtype.element_ty,
            )  # fmt: skip
            k = block * BLOCK + run * RUN + step * STEP + tl.arange(0, STEP)[:, None]
            x = tl.load(x_ptr + m[None, :] * x_stride + k, mask=(m[None, :] < M) & (k < K), other=0.0)
            part = tl.dot(weights, x.to(weights.dtype), part)
        scale = _of_group(scales_ptr, block, run, RUNS, BLOCKS, padded_n, row).to(tl.float32)
        acc += part * (scale * super_scale if SUPER else scale)[:, None]
        if biases_ptr is not None:
            bias = _of_group(biases_ptr, block, run, RUNS, BLOCKS, padded_n, row).to(tl.float32)
            sums = tl.load(sums_ptr + (m * blocks + block) * RUNS + run, mask=m < M, other=0.0)
            acc += (bias * super_bias if SUPER else bias)[:, None] * sums[None, :]
    return acc


@triton.jit
def _of_group(ptr, block, RUN: tl.constexpr, RUNS: tl.constexpr, BLOCKS: tl.constexpr, padded_n, row):
    """The metadata of the rows [BN] for a run of a block: int32 of those of 8 bits, or floats.

    RUNS groups are in a block, or BLOCKS blocks in a group. Whole words are read, which alone are copied asynchronously.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    WIDTH: tl.constexpr = dtype.primitive_bitwidth
    PER_WORD: tl.constexpr = 32 // WIDTH
    if BLOCKS == 1 and RUNS % PER_WORD == 0:
        word = block * (RUNS // PER_WORD) + RUN // PER_WORD
        shift = RUN % PER_WORD * WIDTH
    else:
        group = block // BLOCKS * RUNS + RUN
        word = group // PER_WORD
        shift = (group & (PER_WORD - 1)) * WIDTH
    words_ptr = ptr if WIDTH == 32 else ptr.to(tl.pointer_type(tl.int32))
    values = tl.load(words_ptr + word * padded_n + row)
    if WIDTH == 16:
        values = _half(values, shift, dtype)
    elif dtype == tl.uint8:
        values = values >> shift & 0xFF
    elif dtype == tl.int8:
        values = values << (24 - shift) >> 24
    return values


@triton.jit
def _half(words, shift, dtype: tl.constexpr):
    """One of the two 16-bit floats of each word; interpreted, a bfloat16 is a float32."""
    if dtype == tl.bfloat16 and _INTERPRETED:
        return ((words >> shift) << 16).to(tl.float32, bitcast=True)
    else:
        return (words >> shift & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _unpack(words, zero, table_ptr, SPAN: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):  # fmt: skip  # noqa: E501
    """What is scaled, [BN, COLUMNS], of the words' spans from the given one on; zero is int32 [BN] or [1]."""
    BF16: tl.constexpr = dtype == tl.bfloat16
    if table_ptr is not None:
        pairs = _look_up(words, table_ptr + (8 if BF16 else 0), SPAN)
    else:
        SPANS: tl.constexpr = COLUMNS // 32 if COLUMNS > 32 else 1
        shifts = BITS * (SPAN + tl.arange(0, SPANS))
        pairs = _subtract_zeros(words[:, None, :] >> shifts[None, :, None], zero[:, None, None], BITS, BF16)
    return tl.reshape(tl.join(_half(pairs, 0, dtype), _half(pairs, 16, dtype)), (BN, COLUMNS))


@triton.jit
def _subtract_zeros(words, zero, BITS: tl.constexpr, BF16: tl.constexpr):
    """code - zero of the two codes in the low bits of both halves, as pairs of floats.

    Added to the bits of 1024 as float16, or of 128 as bfloat16, a code is added to the number.
    """
    if not BF16:
        numbers = _pick(words, 0x000F000F if BITS == 4 else 0x00FF00FF, 0x64006400)
        return _subtract_pairs(numbers, zero * 0x10001 + 0x64006400, BF16)
    elif BITS == 4:
        return _subtract_pairs(_pick(words, 0x000F000F, 0x43004300), zero * 0x10001 + 0x43004300, BF16)
    else:
        # Seven bits fit beside 128. The eighth, as -128, is subtracted.
        low = _subtract_pairs(_pick(words, 0x007F007F, 0x43004300), 0x43004300, BF16)
        zeros = (zero.to(tl.float32).to(tl.int32, bitcast=True) >> 16) * 0x10001
        return _subtract_pairs(_subtract_pairs(low, zeros, BF16), (words & 0x00800080) * 0x186, BF16)


@triton.jit
def _look_up(words, table_ptr, SPAN: tl.constexpr):
    """The entries that the two nibbles of a span choose, as pairs: first their low bytes, then their high ones."""
    nibbles = words >> 16 * (SPAN // 2)
    choice, upper = nibbles & 0x7777, (nibbles & 0x8888) >> 1 | 0x3210
    low = _choose_of_16(table_ptr, choice, upper)
    high = _choose_of_16(table_ptr + 4, choice, upper)
    return _choose_bytes(low, high, 0x5140 if SPAN % 2 == 0 else 0x7362)


@triton.jit
def _choose_of_16(bytes_ptr, choice, upper):
    """Of 16 bytes the one of the first or last 8 that each of four nibbles says."""
    first = _choose_bytes(tl.load(bytes_ptr), tl.load(bytes_ptr + 1), choice)
    last = _choose_bytes(tl.load(bytes_ptr + 2), tl.load(bytes_ptr + 3), choice)
    return _choose_bytes(first, last, upper)


@triton.jit
def _choose_bytes(low, high, choice):
    """Four of the eight bytes of two words, one for each of the lower nibbles of `choice`, whose top bits are 0."""
    if _INTERPRETED:
        chosen = choice & 0
        for index in tl.static_range(4):
            nibble = choice >> 4 * index & 7
            chosen |= (tl.where(nibble < 4, low, high) >> (nibble & 3) * 8 & 0xFF) << 8 * index
        return chosen
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, choice], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _pick(words, MASK: tl.constexpr, NUMBERS: tl.constexpr):
    """(words & MASK) | NUMBERS, for which ptxas makes two instructions unless told."""
    if _INTERPRETED:
        return words & MASK | NUMBERS
    else:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [words, MASK, NUMBERS],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _subtract_pairs(pairs, others, BF16: tl.constexpr):
    """Both floats of each word, less those of the other. Compute capability 8 has bfloat16 fma, but no subtraction."""
    if _INTERPRETED:
        dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
        others = others + (pairs & 0)
        low = (_half(pairs, 0, dtype) - _half(others, 0, dtype)).to(tl.float32).to(tl.int32, bitcast=True)
        high = (_half(pairs, 16, dtype) - _half(others, 16, dtype)).to(tl.float32).to(tl.int32, bitcast=True)
        if BF16:
            return low >> 16 & 0xFFFF | high & -0x10000
        low = low.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        high = high.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return low & 0xFFFF | high << 16
    elif BF16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 minus; mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 $0, $2, minus, $1;}", "=r,r,r",
            [pairs, others], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [pairs, others], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _merge(parts_ptr, bias_ptr, out_ptr, M, N, splits, out_stride, COLUMNS: tl.constexpr):
    """The sum of float32 [splits, M, N] in their order, and the bias, to [M, N]."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        total += tl.load(parts_ptr + (m + split * M) * N + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + m * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _gather_columns(x_ptr, inputs_ptr, out_ptr, columns, x_stride, COLUMNS: tl.constexpr):
    """out [M, columns]: of each row of x what `inputs` says, nothing where it is negative."""
    m = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.load(inputs_ptr + column, mask=column < columns, other=-1)
    x = tl.load(x_ptr + m * x_stride + place, mask=place >= 0, other=0.0)
    tl.store(out_ptr + m * columns + column, x, mask=column < columns)


@triton.jit
def _sum_runs(x_ptr, sums_ptr, K, runs, x_stride, RUN: tl.constexpr, AT_ONCE: tl.constexpr):
    """sums float32 [M, runs] of RUN columns each of x, the last ones padded with zeros."""
    m = tl.program_id(0)
    run = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    k = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    x = tl.load(x_ptr + m * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(sums_ptr + m * runs + run, tl.sum(x, 1), mask=run < runs)
