"""Codes of 2 to 8 bits, one a byte or packed into a stream of bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

# A lane is eight codes in 64 bits. This many at once stay in the processor's cache.
_CHUNK_LANES = 1 << 15


def packed_bytes(columns: int, bits: int) -> int:
    """Bytes that a row of `columns` codes takes."""
    return -(-columns * bits // 8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, K], one code a byte → uint8 [N, ceil(K * bits / 8)], a stream of bits, the least significant first.

    With 4 bits, byte j holds code 2j in its low nibble and code 2j + 1 in its high one. Zeros fill the last byte.
    With 8 bits, `codes` itself.
    """
    if bits == 8:
        return codes
    rows, columns = codes.shape
    lanes = _padded(codes, -columns % 8).reshape(-1).view("<u8")
    octets = np.empty((lanes.size, bits), dtype=np.uint8)
    for start in range(0, lanes.size, _CHUNK_LANES):
        chunk = slice(start, start + _CHUNK_LANES)
        packed = _closed(lanes[chunk], bits).view(np.uint8).reshape(-1, 8)
        for place in range(bits):
            octets[chunk, place] = packed[:, place]
    return torch.from_numpy(np.ascontiguousarray(octets.reshape(rows, -1)[:, : packed_bytes(columns, bits)]))


def unpack_codes(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [N, ceil(K * bits / 8)] → uint8 [N, K]; with 8 bits, `packed` itself."""
    if bits == 8:
        return packed
    rows, width = packed.shape[0], packed_bytes(-(-columns // 8) * 8, bits)
    octets = _padded(packed, width - packed.shape[1]).reshape(-1, bits)
    lanes = np.empty(len(octets), dtype="<u8")
    for start in range(0, lanes.size, _CHUNK_LANES):
        chunk = slice(start, start + _CHUNK_LANES)
        closed = np.zeros((len(octets[chunk]), 8), dtype=np.uint8)
        for place in range(bits):
            closed[:, place] = octets[chunk, place]
        lanes[chunk] = _opened(closed.reshape(-1).view("<u8"), bits)
    return torch.from_numpy(lanes.view(np.uint8)).view(rows, -1)[:, :columns]


def _padded(rows: torch.Tensor, missing: int) -> npt.NDArray[np.uint8]:
    """Contiguous, with so many zeros after each row."""
    array: npt.NDArray[np.uint8] = rows.numpy()
    return np.pad(array, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(array)


def _closed(lanes: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    """Eight codes of a byte each → the 8 * bits low bits: gaps close between bytes, then pairs, then fours."""
    for apart in (8, 16, 32):
        width = apart // 8 * bits
        low = _repeated(width, 2 * apart)
        high = low << np.uint64(width)
        lanes = (lanes & low) | (lanes >> np.uint64(apart - width) & high)
    return lanes


def _opened(lanes: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    """The inverse of `_closed`."""
    for apart in (32, 16, 8):
        width = apart // 8 * bits
        low = _repeated(width, 2 * apart)
        high = low << np.uint64(width)
        lanes = (lanes & low) | ((lanes & high) << np.uint64(apart - width))
    return lanes


def _repeated(width: int, every: int) -> np.uint64:
    """`width` ones every so many bits."""
    ones = (1 << width) - 1
    pattern: np.uint64 = np.uint64(sum(ones << at for at in range(0, 64, every)))
    return pattern
