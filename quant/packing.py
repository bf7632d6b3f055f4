"""Codes of 2 to 8 bits, one a byte or packed into a stream of bits."""

from __future__ import annotations

import torch

# Odd widths go through 64-bit lanes: this many codes at once keep those small.
_CHUNK_CODES = 1 << 20
# A byte of 2- or 4-bit codes in a lane of a byte for each, and the shifts and masks that move the codes there.
_LANES = {2: torch.int32, 4: torch.int16}
_SPREAD = {2: ((12, 0x000F000F), (6, 0x03030303)), 4: ((4, 0x0F0F),)}


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
    codes = torch.nn.functional.pad(codes, (0, -columns % 8))
    if bits in _LANES:
        lanes = codes.contiguous().view(_LANES[bits])
        for shift, mask in reversed(_SPREAD[bits]):
            lanes = (lanes & mask) | (lanes >> shift)
        packed = (lanes & 0xFF).to(torch.uint8)
    else:
        packed = codes.new_empty(rows, codes.shape[1] // 8 * bits)
        for some, out in _row_chunks(codes, packed):
            lanes = some.view(len(some), -1, 8).long() << _shifts(bits)
            out.view(len(some), -1, bits).copy_(lanes.sum(-1, keepdim=True).view(torch.uint8)[..., :bits])
    return packed[:, : packed_bytes(columns, bits)].contiguous()


def unpack_codes(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [N, ceil(K * bits / 8)] → uint8 [N, K]; with 8 bits, `packed` itself."""
    if bits == 8:
        return packed
    if bits in _LANES:
        lanes = packed.to(_LANES[bits])
        for shift, mask in _SPREAD[bits]:
            lanes |= lanes << shift
            lanes &= mask
        return lanes.view(torch.uint8)[:, :columns]
    rows = packed.shape[0]
    codes = packed.new_empty(rows, -(-columns // 8) * 8)
    packed = torch.nn.functional.pad(packed, (0, packed_bytes(codes.shape[1], bits) - packed.shape[1]))
    for some, out in _row_chunks(packed, codes):
        octets = torch.nn.functional.pad(some.view(len(some), -1, bits), (0, 8 - bits))
        lanes = octets.contiguous().view(torch.int64) >> _shifts(bits) & ((1 << bits) - 1)
        out.view(len(some), -1, 8).copy_(lanes)
    return codes[:, :columns]


def _shifts(bits: int) -> torch.Tensor:
    return torch.arange(0, 8 * bits, bits)


def _row_chunks(source: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = max(1, _CHUNK_CODES // max(1, target.shape[1]))
    return list(zip(source.split(size), target.split(size), strict=True))
