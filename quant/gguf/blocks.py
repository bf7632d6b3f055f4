"""GGUF's block formats (ggml-common.h) into the canonical form, losslessly.

A row of the raw bytes is a row of blocks. The 4-bit blocks keep values 0 … 15 in low nibbles and 16 … 31 in
high ones; the canonical form keeps neighbours in one byte.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from appliance.quant.scheme import Mode, QuantScheme
from appliance.quant.tensor import DenseTensor, QuantTensor, Weight

Bytes = npt.NDArray[np.uint8]

_GROUP = 32
_Q4_0 = QuantScheme(4, _GROUP, Mode.SYM)
_Q4_1 = QuantScheme(4, _GROUP, Mode.AFFINE)
_Q8_0 = QuantScheme(8, _GROUP, Mode.SYM)


def q4_0(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d and 32 nibbles; w = (q - 8) * d."""
    blocks = _blocks(rows, 18)
    shape = (rows.shape[0], blocks.shape[1] * _GROUP)
    return QuantTensor(_neighbours(blocks[..., 2:]), _halves(blocks[..., :2]), shape, _Q4_0)


def q4_1(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d, fp16 m and 32 nibbles; w = q * d + m."""
    blocks = _blocks(rows, 20)
    shape = (rows.shape[0], blocks.shape[1] * _GROUP)
    scales, biases = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return QuantTensor(_neighbours(blocks[..., 4:]), scales, shape, _Q4_1, biases=biases)


def q8_0(rows: Bytes) -> QuantTensor:
    """Blocks of fp16 d and 32 int8; w = q * d. The canonical code is q + 128."""
    blocks = _blocks(rows, 34)
    shape = (rows.shape[0], blocks.shape[1] * _GROUP)
    # Adding 128 to a two's complement byte flips its top bit.
    codes = torch.from_numpy((blocks[..., 2:] ^ 0x80).reshape(shape))
    return QuantTensor(codes, _halves(blocks[..., :2]), shape, _Q8_0)


def f32(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.float32)


def f16(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.float16)


def bf16(rows: Bytes) -> DenseTensor:
    return _dense(rows, torch.bfloat16)


READERS: dict[str, Callable[[Bytes], Weight]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q8_0": q8_0,
    "F32": f32,
    "F16": f16,
    "BF16": bf16,
}
"""By ggml's name of the type: raw bytes [N, row bytes] → weight [N, K], sharing no memory with them."""


def _blocks(rows: Bytes, block_bytes: int) -> Bytes:
    return rows.reshape(rows.shape[0], -1, block_bytes)


def _halves(raw: Bytes) -> torch.Tensor:
    """Little-endian fp16: uint8 [N, blocks, 2] → float16 [N, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float16))


def _neighbours(nibbles: Bytes) -> torch.Tensor:
    """Bytes of values (j, j + 16) → bytes of values (2j, 2j + 1): [N, blocks, 16] → [N, blocks * 16]."""
    even, odd = nibbles[..., 0::2], nibbles[..., 1::2]
    packed = np.empty(nibbles.shape, dtype=np.uint8)
    np.bitwise_or(even & 0x0F, odd << 4, out=packed[..., :8])
    np.bitwise_or(even >> 4, odd & 0xF0, out=packed[..., 8:])
    return torch.from_numpy(packed.reshape(nibbles.shape[0], -1))


def _dense(rows: Bytes, dtype: torch.dtype) -> DenseTensor:
    return DenseTensor(torch.from_numpy(rows.copy()).view(dtype))
