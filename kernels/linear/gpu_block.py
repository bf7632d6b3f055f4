"""A block of a quantised matrix times rows, within a Triton kernel.

Codes become 16-bit floats by their bits alone, whole numbers that are exact; the product of a group is multiplied by
the group's scale where it was added up, in float32. So what a weight is worth is never rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Inline assembly is not interpreted and the interpreter's bfloat16 is wrong: both have twins.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def add_block(
    acc, words, x_ptr, scales_ptr, zeros_ptr, biases_ptr, super_scales_ptr, super_biases_ptr, table_ptr, sums_ptr,
    m, row, block, M, K, padded_m, padded_n, x_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] and the products of one block's columns, whose words are [BN, 16]."""
    BLOCK: tl.constexpr = 512 // BITS
    # Columns of a block with the same metadata, and those of them that one product takes.
    RUN: tl.constexpr = GROUP if GROUP < BLOCK else BLOCK
    RUNS: tl.constexpr = BLOCK // RUN
    BLOCKS: tl.constexpr = GROUP // RUN
    # Of few rows, little is copied at once otherwise; of many, more would take too many registers.
    STEP: tl.constexpr = RUN if RUN < 32 or (table_ptr is None and BM < 16) else 32
    halves = (words, words)
    if RUN == 16:
        halves = tl.split(tl.permute(tl.reshape(words, (BN, 2, 8)), (0, 2, 1)))
    if SUPER:
        super_scale = _of_group(super_scales_ptr, block, 0, 1, SUPER // BLOCK, padded_n, row).to(tl.float32)
        if super_biases_ptr is not None:
            super_bias = _of_group(super_biases_ptr, block, 0, 1, SUPER // BLOCK, padded_n, row).to(
                tl.float32
            )
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
        # Fused whatever else is compiled with it.
        acc = tl.fma(part, (scale * super_scale if SUPER else scale)[:, None], acc)
        if biases_ptr is not None:
            bias = _of_group(biases_ptr, block, run, RUNS, BLOCKS, padded_n, row).to(tl.float32)
            # Rows beyond M have some, of which nothing is stored.
            sums = tl.load(sums_ptr + (block * RUNS + run) * padded_m + m)
            acc = tl.fma((bias * super_bias if SUPER else bias)[:, None], sums[None, :], acc)
    return acc


@triton.jit
def _of_group(ptr, block, RUN: tl.constexpr, RUNS: tl.constexpr, BLOCKS: tl.constexpr, padded_n, row):
    """The metadata of the rows [BN] for a run of a block: int32 of those of 8 bits, or floats.

    RUNS groups are in a block, or BLOCKS blocks in a group. Words are read: less is not copied asynchronously.
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
def _unpack(
    words, zero, table_ptr, SPAN: tl.constexpr,
    BITS: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
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
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    if not BF16:
        return _subtract_pairs(_pick(words, MASK, 0x64006400), zero * 0x10001 + 0x64006400, BF16)
    elif BITS < 8:
        return _subtract_pairs(_pick(words, MASK, 0x43004300), zero * 0x10001 + 0x43004300, BF16)
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
