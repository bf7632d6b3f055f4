"""GGUF's formats of 32 weights a block, and dense ones (ggml-common.h), into the canonical form, losslessly.

A row of the raw bytes is a row of blocks. They keep values 0 … 15 in low nibbles and 16 … 31 in high ones.
"""

from __future__ import annotations

import numpy as np
import torch

from appliance.quant.gguf.raw import (
    Bytes,
    Lanes,
    blocks_of,
    fields,
    halves,
    joined,
    lanes_of,
    packed,
    packed_nibbles,
)
from appliance.quant.scheme import Codebook, Mode, QuantScheme
from appliance.quant.tensor import DenseTensor, QuantTensor

_GROUP = 32
_Q4_0 = QuantScheme(4, _GROUP, Mode.SYM)
_Q4_1 = QuantScheme(4, _GROUP, Mode.AFFINE)
_Q5_0 = QuantScheme(5, _GROUP, Mode.SYM)
_Q5_1 = QuantScheme(5, _GROUP, Mode.AFFINE)
_Q8_0 = QuantScheme(8, _GROUP, Mode.SYM)
_IQ4_NL = QuantScheme(4, _GROUP, Mode.CODEBOOK, codebook=Codebook.IQ4_NL)
_MXFP4 = QuantScheme(4, _GROUP, Mode.CODEBOOK, codebook=Codebook.E2M1)


def q4_0(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d and 32 nibbles; w = (q - 8) * d."""
    blocks = blocks_of(rows, 18)
    return QuantTensor(_fours(blocks[..., 2:]), halves(blocks[..., :2]), _shape(blocks), _Q4_0)


def q4_1(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, fp16 m and 32 nibbles; w = q * d + m."""
    blocks = blocks_of(rows, 20)
    scales, biases = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    return QuantTensor(_fours(blocks[..., 4:]), scales, _shape(blocks), _Q4_1, biases=biases)


def q5_0(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, 32 fifth bits and 32 nibbles; w = (q - 16) * d."""
    blocks = blocks_of(rows, 22)
    return QuantTensor(_fives(blocks[..., 2:]), halves(blocks[..., :2]), _shape(blocks), _Q5_0)


def q5_1(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, fp16 m, 32 fifth bits and 32 nibbles; w = q * d + m."""
    blocks = blocks_of(rows, 24)
    scales, biases = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    return QuantTensor(_fives(blocks[..., 4:]), scales, _shape(blocks), _Q5_1, biases=biases)


def q8_0(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d and 32 int8; w = q * d. The canonical code is q + 128."""
    blocks = blocks_of(rows, 34)
    # Adding 128 to a two's complement byte flips its top bit.
    codes = torch.from_numpy((blocks[..., 2:] ^ 0x80).reshape(_shape(blocks)))
    return QuantTensor(codes, halves(blocks[..., :2]), _shape(blocks), _Q8_0)


def iq4_nl(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d and 32 nibbles; w = table[q] * d."""
    blocks = blocks_of(rows, 18)
    return QuantTensor(_fours(blocks[..., 2:]), halves(blocks[..., :2]), _shape(blocks), _IQ4_NL)


def mxfp4(rows: Bytes) -> QuantTensor:
    """Blocks of an exponent byte e and 32 E2M1 nibbles; w = e2m1[q] * 2**(e - 127), NaN where e is 255.

    OCP Microscaling Formats 1.0 defines 255 as NaN; ggml computes something finite for some codes.
    """
    blocks = blocks_of(rows, 17)
    # e is bfloat16's own exponent field, except for the subnormal 2**-127 and for NaN.
    scales = blocks[..., 0].astype(np.int16) << 7
    scales[blocks[..., 0] == 0] = 0x0040
    scales[blocks[..., 0] == 255] = 0x7FC0
    codes = _fours(blocks[..., 1:])
    _drop_minus_zeros(codes.numpy())
    return QuantTensor(codes, torch.from_numpy(scales).view(torch.bfloat16), _shape(blocks), _MXFP4)


def f32(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.float32)


def f16(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.float16)


def bf16(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.bfloat16)


def _shape(blocks: Bytes) -> tuple[int, int]:
    return blocks.shape[0], blocks.shape[1] * _GROUP


def _fours(nibbles: Bytes) -> torch.Tensor:
    """[N, blocks, 16] → 4-bit codes."""
    return packed_nibbles(nibbles, 16)


def _fives(raw: Bytes) -> torch.Tensor:
    """[N, blocks, 4 + 16], fifth bits before nibbles → 5-bit codes."""

    def codes(raw: Bytes) -> Lanes:
        high = np.unpackbits(np.ascontiguousarray(raw[..., :4]).reshape(-1), bitorder="little")
        return joined(fields(lanes_of(raw[..., 4:]), 4, run=16), lanes_of(high.reshape(-1, 1, _GROUP)), 4)

    return packed(raw, raw.shape[1] * _GROUP, 5, codes)


def _drop_minus_zeros(nibbles: Bytes) -> None:
    """E2M1's -0.0, code 8, becomes +0.0, code 0: ggml's table of integers has no other zero."""
    magnitudes = nibbles & 0x77
    not_zero = (magnitudes | magnitudes >> 1 | magnitudes >> 2) & 0x11
    nibbles &= magnitudes | not_zero << 3


def _dense(rows: Bytes, dtype: torch.dtype) -> DenseTensor:
    return DenseTensor(torch.from_numpy(rows.copy()).view(dtype))
