"""What the readers of block formats share: views of raw blocks, and packing without whole unpacked tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from appliance.quant.packing import pack_codes, packed_bytes

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[np.uint64]

# Unpacked, a code takes a byte, and what it is made of several more: so many at once stay in the cache.
_CHUNK_CODES = 1 << 18


def blocks_of(rows: Bytes, block_bytes: int) -> Bytes:
    """[N, row bytes] → [N, blocks, block_bytes], a view."""
    return rows.reshape(rows.shape[0], -1, block_bytes)


def halves(raw: Bytes) -> torch.Tensor:
    """Little-endian fp16: [N, blocks, 2] → float16 [N, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float16))


def lanes_of(raw: Bytes) -> Lanes:
    """Eight neighbouring bytes at a time, those of all blocks together: [M, blocks, W] → [W / 8, M * blocks].

    With the blocks last, what follows are loops over thousands of numbers instead of a handful.
    """
    lanes = np.ascontiguousarray(raw).reshape(-1, raw.shape[-1]).view("<u8")
    return np.ascontiguousarray(lanes.T)


def fields(lanes: Lanes, bits: int, run: int) -> Lanes:
    """Bytes split into 8 / bits planes, the least significant bits first: [L, n] → [L * 8 / bits, n].

    Args:
        run: how many bytes of a plane come before those of the next one.
    """
    runs = lanes.reshape(-1, 1, run // 8, lanes.shape[-1])
    places = np.arange(0, 8, bits, dtype=np.uint64).reshape(-1, 1, 1)
    planes = runs >> places
    planes &= np.uint64(((1 << bits) - 1) * 0x0101_0101_0101_0101)
    return planes.reshape(-1, lanes.shape[-1])


def joined(low: Lanes, high: Lanes, bits: int) -> Lanes:
    """Codes of `bits` low bits and more high ones; [L, n] each."""
    codes: Lanes = low | high << np.uint64(bits)
    return codes


def packed(blocks: Bytes, columns: int, bits: int, codes: Callable[[Bytes], Lanes]) -> torch.Tensor:
    """Canonical codes, uint8 [N, ceil(columns * bits / 8)].

    Args:
        blocks: [N, blocks, block bytes].
        codes: of some of the rows of `blocks`, one a byte, in order: [M, blocks, …] → [lanes, M * blocks].
    """
    result = np.empty((len(blocks), packed_bytes(columns, bits)), dtype=np.uint8)
    step = max(1, _CHUNK_CODES // columns)
    for start in range(0, len(blocks), step):
        some = np.ascontiguousarray(codes(blocks[start : start + step]).T).view(np.uint8)
        result[start : start + step] = pack_codes(torch.from_numpy(some.reshape(-1, columns)), bits).numpy()
    return torch.from_numpy(result)


def packed_nibbles(blocks: Bytes, half: int) -> torch.Tensor:
    """As `packed`, for blocks that are bytes of values (j, j + half), in runs of `half` bytes.

    4-bit codes, the most common, can be turned into neighbours (2j, 2j + 1) without unpacking them.
    """
    columns = blocks.shape[1] * blocks.shape[2] * 2
    result = np.empty((len(blocks), columns // half // 2, 2, half // 2), dtype=np.uint8)
    step = max(1, _CHUNK_CODES // columns)
    for start in range(0, len(blocks), step):
        some = np.ascontiguousarray(blocks[start : start + step]).reshape(-1, columns // half // 2, half)
        pairs = some.view("<u2")
        out = result[start : start + step]
        out[:, :, 0] = pairs & 0x0F | pairs >> 4 & 0xF0
        out[:, :, 1] = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    return torch.from_numpy(result.reshape(len(blocks), -1))
