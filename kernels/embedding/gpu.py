"""Rows of an embedding in Triton, each weight as its formula gives it in float32; quantised as products read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from appliance.kernels.linear.gpu_matrix import SPAN, TILE_ROWS, WORDS, GpuMatrix

_TILE = 512
_TILE_ROWS, _WORDS, _SPAN = tl.constexpr(TILE_ROWS), tl.constexpr(WORDS), tl.constexpr(SPAN)


def embed(out: torch.Tensor, tokens: torch.Tensor, table: GpuMatrix | torch.Tensor, factor: float) -> None:
    """out[row] = table[tokens[row]] · factor, in float32 and rounded once.

    A quantised weight is bit for bit what it is dequantised to.

    Args:
        out: [rows, K], fp16, bf16 or fp32, rows contiguous.
        tokens: int32 or int64 [rows], contiguous, each a row of the table.
        table: quantised, or of those types [vocabulary, K], contiguous.
    """
    rows, width = out.shape
    assert tokens.shape == (rows,)
    assert tokens.is_contiguous()
    assert out.stride(1) == 1
    if isinstance(table, torch.Tensor):
        assert table.is_contiguous()
        assert table.shape[1] == width
        gather_rows_kernel[(rows, triton.cdiv(width, _TILE))](
            out, tokens, table, out.stride(0), width, factor, TILE=_TILE, num_warps=4
        )
        return
    assert table.input_width == width
    embed_kernel[(rows, triton.cdiv(table.columns, _TILE))](
        out,
        tokens,
        table.codes,
        table.scales,
        table.zeros,
        table.biases,
        table.super_scales,
        table.super_biases,
        # The first row is float16; their low bytes, then their high ones.
        None if table.table is None else table.table[0].view(torch.uint8),
        table.inputs,
        out.stride(0),
        table.columns,
        table.codes.shape[1],
        table.scales.shape[1],
        factor,
        BITS=table.bits,
        GROUP=table.group,
        SUPER=table.super_group,
        ZERO=table.zero,
        TILE=_TILE,
        num_warps=4,
        # A product and a sum, each rounded, as the tools that make checkpoints do.
        enable_fp_fusion=False,
    )


@triton.jit
def embed_kernel(
    out_ptr,
    tokens_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    biases_ptr,
    super_scales_ptr,
    super_biases_ptr,
    table_ptr,
    inputs_ptr,
    out_stride,
    columns,
    blocks,
    padded_n,
    factor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    ZERO: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    token = tl.load(tokens_ptr + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = column < columns
    BLOCK: tl.constexpr = _SPAN * _WORDS // BITS
    block, span, half = column // BLOCK, column % BLOCK // _SPAN, column % 2
    tile = (token // _TILE_ROWS * blocks + block) * _TILE_ROWS + token % _TILE_ROWS
    word = tl.load(codes_ptr + tile * _WORDS + column % _SPAN // 2, mask=held, other=0)
    if table_ptr is not None:
        code = word >> (2 * BITS * span + BITS * half) & ((1 << BITS) - 1)
        bits = tl.load(table_ptr + code).to(tl.int16) | tl.load(table_ptr + 16 + code).to(tl.int16) << 8
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        code = word >> (BITS * span + 16 * half) & ((1 << BITS) - 1)
        if zeros_ptr is not None:
            x = code.to(tl.float32) - _of_columns(zeros_ptr, token, column, held, GROUP, padded_n)
        elif biases_ptr is not None:
            x = code.to(tl.float32)
        else:
            x = (code - ZERO).to(tl.float32)
    scale = _of_columns(scales_ptr, token, column, held, GROUP, padded_n)
    if super_scales_ptr is not None:
        scale *= _of_columns(super_scales_ptr, token, column, held, SUPER, padded_n)
    x *= scale
    if biases_ptr is not None:
        bias = _of_columns(biases_ptr, token, column, held, GROUP, padded_n)
        if super_biases_ptr is not None:
            bias *= _of_columns(super_biases_ptr, token, column, held, SUPER, padded_n)
        x += bias
    if inputs_ptr is not None:
        column = tl.load(inputs_ptr + column, mask=held, other=-1)
        held = column >= 0
    target = out_ptr + tl.program_id(0).to(tl.int64) * out_stride + column
    tl.store(target, (x * factor).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _of_columns(ptr, token, column, held, GROUP: tl.constexpr, padded_n):
    """The metadata of a row's columns, each GROUP of which share theirs, as float32."""
    PER_WORD: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    group = column // GROUP
    place = (group // PER_WORD * padded_n + token) * PER_WORD + group % PER_WORD
    return tl.load(ptr + place, mask=held, other=0).to(tl.float32)


@triton.jit
def gather_rows_kernel(out_ptr, tokens_ptr, table_ptr, out_stride, width, factor, TILE: tl.constexpr):
    """Program (row, tile of columns)."""
    token = tl.load(tokens_ptr + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(table_ptr + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    target = out_ptr + tl.program_id(0).to(tl.int64) * out_stride + column
    tl.store(target, (x * factor).to(out_ptr.dtype.element_ty), mask=column < width)
