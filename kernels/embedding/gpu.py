"""Rows of a quantised embedding in Triton, from canonical codes: bit for bit what they are dequantised to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_TILE = 512


@triton.jit
def embed_kernel(
    out,
    tokens,
    codes,
    scales,
    zeros,
    biases,
    sub_scales,
    sub_biases,
    values,
    row_bytes,
    width,
    factor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SUPER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    row, token = tl.program_id(0).to(tl.int64), tl.load(tokens + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = column < width
    at, shift = codes + token * row_bytes + column * BITS // 8, column * BITS % 8
    code = tl.load(at, mask=held, other=0).to(tl.int32)
    if 8 % BITS:
        code |= tl.load(at + 1, mask=held & (shift + BITS > 8), other=0).to(tl.int32) << 8
    code = (code >> shift) & ((1 << BITS) - 1)
    group = token * tl.cdiv(width, GROUP) + column // GROUP
    of_scale = token * tl.cdiv(width, SUPER) + column // SUPER
    if values is not None:
        x = tl.load(values + code)
    elif zeros is not None:
        x = (code - tl.load(zeros + group, mask=held, other=0).to(tl.int32)).to(tl.float32)
    elif biases is not None:
        x = code.to(tl.float32)
    else:
        x = (code - (1 << (BITS - 1))).to(tl.float32)
    scale = tl.load(scales + of_scale, mask=held, other=0.0).to(tl.float32)
    if sub_scales is not None:
        scale *= tl.load(sub_scales + group, mask=held, other=0).to(tl.float32)
    x *= scale
    if biases is not None:
        bias = tl.load(biases + of_scale, mask=held, other=0.0).to(tl.float32)
        if sub_biases is not None:
            bias *= tl.load(sub_biases + group, mask=held, other=0).to(tl.float32)
        x += bias
    tl.store(out + row * width + column, (x * factor).to(out.dtype.element_ty), mask=held)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedRows:
    """A quantised matrix [N, K] as `quant.tensor.QuantTensor` has it, without a permutation.

    Attributes:
        codes: uint8 [N, ceil(K · bits / 8)], streams of bits, the least significant first.
        scales, biases: fp16, bf16 or fp32, of each `group_size` columns, or with sub-scales of each `super_size`.
        zeros: uint8, sub_scales, sub_biases: int8, of each `group_size` columns.
        values: float32 [2**bits], what codes stand for, where that is no whole number.
    """

    codes: torch.Tensor
    bits: int
    group_size: int
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    sub_scales: torch.Tensor | None = None
    sub_biases: torch.Tensor | None = None
    super_size: int = 0
    values: torch.Tensor | None = None


def embed(out: torch.Tensor, tokens: torch.Tensor, table: QuantisedRows, factor: float) -> None:
    """out[row] = table[tokens[row]] · factor.

    Args:
        out: [rows, K], contiguous, fp16, bf16 or fp32.
        tokens: int32 or int64 [rows], each a row of the table.
    """
    rows, width = out.shape
    assert out.is_contiguous()
    assert tokens.shape == (rows,)
    assert table.codes.shape[1] == -(-width * table.bits // 8)
    embed_kernel[(rows, triton.cdiv(width, _TILE))](
        out,
        tokens,
        table.codes,
        table.scales,
        table.zeros,
        table.biases,
        table.sub_scales,
        table.sub_biases,
        table.values,
        table.codes.shape[1],
        width,
        factor,
        BITS=table.bits,
        GROUP=table.group_size,
        SUPER=table.super_size or table.group_size,
        TILE=_TILE,
        num_warps=4,
        # A product and a sum, each rounded, as the tools that make checkpoints do.
        enable_fp_fusion=False,
    )
