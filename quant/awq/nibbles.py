"""4-bit codes in int32 words into another order, a whole word at a time.

Masked shifts run at the speed of the cache, so words are turned in chunks that stay in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK_WORDS = 1 << 18
# A cache line of output words holds so many rows.
_CHUNK_ROWS = 128
# Which half of a word changes places with its neighbour's, from halves down to nibbles.
_STAGES = ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F))


def transpose_nibbles(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """int32 [K, M], overwritten → int32 [M, 8, K / 8]: nibble k % 8 of [m, order[i], k // 8] was nibble i of [k, m].

    K must be a multiple of 8.
    """
    rows, width = words.shape
    out = words.new_empty(width, 8, rows // 8)
    size = max(1, _CHUNK_WORDS // (width * _CHUNK_ROWS)) * _CHUNK_ROWS
    for chunk, target in zip(words.split(size), out.split(size // 8, dim=2), strict=True):
        octets = chunk.view(-1, 8, width)
        _transpose_octets(octets)
        for nibble, place in enumerate(order):
            target[:, place].copy_(octets[:, nibble].t())
    return out


def _transpose_octets(octets: torch.Tensor) -> None:
    """int32 [..., 8, M], in place: each 8 words are an 8 x 8 matrix of nibbles (Warren, Hacker's Delight, 7-3)."""
    temporary = octets.new_empty(octets.numel() // 2)
    for shift, mask in _STAGES:
        pairs = octets.view(len(octets), -1, 2, shift // 4, octets.shape[-1])
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        swap = temporary.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swap)
        swap.bitwise_xor_(high).bitwise_and_(mask)
        high.bitwise_xor_(swap)
        low.bitwise_xor_(swap.bitwise_left_shift_(shift))


def pair_nibbles(words: torch.Tensor) -> None:
    """int32, in place: byte i becomes what nibble i was (low) and nibble i + 4 (high)."""
    for chunk in words.view(-1).split(_CHUNK_WORDS):
        for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
            swap = (chunk >> shift).bitwise_xor_(chunk).bitwise_and_(mask)
            chunk.bitwise_xor_(swap)
            chunk.bitwise_xor_(swap.bitwise_left_shift_(shift))


def unpack_nibbles(words: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 [R, M] → uint8 [R, 8 * M]; `order[i]` is the place of nibble i among its eight."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).view(len(words), -1)
