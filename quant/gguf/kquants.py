"""GGUF's formats of 256 weights a block, with quantised scales (ggml-common.h), into the canonical form, losslessly.

A row of the raw bytes is a row of blocks; a block is a super-block of 8 or 16 groups.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
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
from appliance.quant.scheme import SUPER_SIZE, Codebook, Mode, QuantScheme
from appliance.quant.tensor import QuantTensor

_Q2_K = QuantScheme(2, 16, Mode.KQUANT, super_size=SUPER_SIZE)
_Q3_K = QuantScheme(3, 16, Mode.KQUANT, super_size=SUPER_SIZE)
_Q4_K = QuantScheme(4, 32, Mode.KQUANT, super_size=SUPER_SIZE)
_Q5_K = QuantScheme(5, 32, Mode.KQUANT, super_size=SUPER_SIZE)
_Q6_K = QuantScheme(6, 16, Mode.KQUANT, super_size=SUPER_SIZE)
_IQ4_XS = QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.IQ4_NL, super_size=SUPER_SIZE)


def q2_k(rows: Bytes) -> QuantTensor:
    """Blocks of 16 bytes (scale, min nibbles), 64 bytes of codes, fp16 d, fp16 dmin; w = q * d * scale - dmin * min."""
    blocks = blocks_of(rows, 84)
    shape = _shape(blocks)
    subs = _words(blocks[..., :16])
    return QuantTensor(
        packed(blocks[..., 16:80], shape[1], 2, _twos),
        halves(blocks[..., 80:82]),
        shape,
        _Q2_K,
        biases=-halves(blocks[..., 82:84]),
        sub_scales=_of_groups(subs & 0x0F0F_0F0F),
        sub_biases=_of_groups(subs >> 4 & 0x0F0F_0F0F),
    )


def q3_k(rows: Bytes) -> QuantTensor:
    """Blocks of 256 third bits, 64 bytes of two bits, 16 6-bit scales, fp16 d; w = (q - 4) * d * (scale - 32)."""

    def codes(raw: Bytes) -> Lanes:
        return joined(_twos(raw[..., 32:]), fields(lanes_of(raw[..., :32]), 1, run=32), 2)

    blocks = blocks_of(rows, 110)
    shape = _shape(blocks)
    words = _words(blocks[..., 96:108])
    first, second, tops = words[..., 0], words[..., 1], words[..., 2]
    scales = [
        word & 0x0F0F_0F0F | (tops >> (2 * place) & 0x0303_0303) << 4
        for place, word in enumerate((first, second, first >> 4, second >> 4))
    ]
    return QuantTensor(
        packed(blocks[..., :96], shape[1], 3, codes),
        halves(blocks[..., 108:]),
        shape,
        _Q3_K,
        sub_scales=_of_groups(np.stack(scales, axis=-1)) - 32,
    )


def q4_k(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, fp16 dmin, 8 6-bit scales and mins, 256 nibbles; w = q * d * scale - dmin * min."""
    blocks = blocks_of(rows, 144)
    return _with_mins(blocks, packed_nibbles(blocks[..., 16:], 32), _Q4_K)


def q5_k(rows: Bytes) -> QuantTensor:
    """As Q4_K, with 256 fifth bits before the nibbles."""

    def codes(raw: Bytes) -> Lanes:
        low, high = lanes_of(raw[..., 32:]), lanes_of(raw[..., :32])
        return joined(fields(low, 4, run=32), fields(high, 1, run=32), 4)

    blocks = blocks_of(rows, 176)
    return _with_mins(blocks, packed(blocks[..., 16:], _shape(blocks)[1], 5, codes), _Q5_K)


def q6_k(rows: Bytes) -> QuantTensor:
    """Blocks of 256 nibbles, 64 bytes of two more bits, 16 int8 scales, fp16 d; w = (q - 32) * d * scale."""

    def codes(raw: Bytes) -> Lanes:
        return joined(fields(lanes_of(raw[..., :128]), 4, run=64), _twos(raw[..., 128:]), 4)

    blocks = blocks_of(rows, 210)
    shape = _shape(blocks)
    return QuantTensor(
        packed(blocks[..., :192], shape[1], 6, codes),
        halves(blocks[..., 208:]),
        shape,
        _Q6_K,
        sub_scales=_of_groups(blocks[..., 192:208].copy()),
    )


def iq4_xs(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, 8 6-bit scales (high bits first), 256 nibbles as in IQ4_NL; w = table[q] * d * (scale - 32)."""
    blocks = blocks_of(rows, 136)
    # Both are in the order of the groups: pairs of bits, and nibbles.
    high = np.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    low = np.stack([blocks[..., 4:8] & 0x0F, blocks[..., 4:8] >> 4], axis=-1)
    scales = low.reshape(*blocks.shape[:2], 8) | high.reshape(*blocks.shape[:2], 8) << 4
    return QuantTensor(
        packed_nibbles(blocks[..., 8:], 16),
        halves(blocks[..., :2]),
        _shape(blocks),
        _IQ4_XS,
        sub_scales=_of_groups(scales) - 32,
    )


def _with_mins(blocks: Bytes, codes: torch.Tensor, scheme: QuantScheme) -> QuantTensor:
    """Blocks that begin with fp16 d, fp16 dmin, and 8 scales and mins of 6 bits in 12 bytes.

    Bytes 0 … 3 hold the first four scales and bytes 4 … 7 the first four mins, in their low six bits. Bytes
    8 … 11 hold the low nibbles of the last four, scales low and mins high; the top two bits of bytes 0 … 7
    complete them.
    """
    words = _words(blocks[..., 4:16])
    scales, mins, last = words[..., 0], words[..., 1], words[..., 2]
    last_scales = last & 0x0F0F_0F0F | scales >> 2 & 0x3030_3030
    last_mins = last >> 4 & 0x0F0F_0F0F | mins >> 2 & 0x3030_3030
    return QuantTensor(
        codes,
        halves(blocks[..., :2]),
        _shape(blocks),
        scheme,
        biases=-halves(blocks[..., 2:4]),
        sub_scales=_of_groups(np.stack([scales & 0x3F3F_3F3F, last_scales], axis=-1)),
        sub_biases=_of_groups(np.stack([mins & 0x3F3F_3F3F, last_mins], axis=-1)),
    )


def _shape(blocks: Bytes) -> tuple[int, int]:
    return blocks.shape[0], blocks.shape[1] * SUPER_SIZE


def _words(raw: Bytes) -> npt.NDArray[np.uint32]:
    """Four bytes at a time: [N, blocks, W] → [N, blocks, W / 4]."""
    return np.ascontiguousarray(raw).view("<u4")


def _of_groups(integers: npt.NDArray[Any]) -> torch.Tensor:
    """Bytes of two's complement, for the groups in order: [N, blocks, …] → int8 [N, groups]."""
    return torch.from_numpy(integers.reshape(len(integers), -1).view(np.int8))


def _twos(raw: Bytes) -> Lanes:
    """Two bits of 256 values in 64 bytes; byte j of each half holds values j, j + 32, j + 64 and j + 96 of 128."""
    return fields(lanes_of(raw), 2, run=32)
