"""4-bit codes in int32 words into another order, a whole word at a time.

Masked shifts run at the speed of the cache, so words are turned in chunks that stay in it, with their long side last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_WORDS = 1 << 18
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
    size = max(1, CHUNK_WORDS // (width * _CHUNK_ROWS)) * _CHUNK_ROWS
    for chunk, target in zip(torch.split(words, size), torch.split(out, size // 8, dim=2), strict=True):
        octets = chunk.view(-1, 8, width)
        transpose_squares(octets)
        for nibble, place in enumerate(order):
            target[:, place].copy_(octets[:, nibble].t())
    return out


def transpose_squares(words: torch.Tensor) -> None:
    """int32 [B, R, M], in place: each R words, 4 or 8, are a matrix of R x R bytes or nibbles.

    Hacker's Delight (Warren), 7-3.
    """
    height = words.shape[1]
    temporary = words.new_empty(words.numel() // 2)
    for shift, mask in _STAGES[: height.bit_length() - 1]:
        pairs = words.view(len(words), -1, 2, shift * height // 32, words.shape[2])
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        swap = temporary.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swap)
        swap.bitwise_xor_(high).bitwise_and_(mask)
        high.bitwise_xor_(swap)
        low.bitwise_xor_(swap.bitwise_left_shift_(shift))


def pair_nibbles(words: torch.Tensor) -> None:
    """int32, in place: byte i becomes what nibble i was (low) and nibble i + 4 (high)."""
    for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swap = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swap)
        words.bitwise_xor_(swap.bitwise_left_shift_(shift))


def unpack_nibbles(words: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 [R, M] → uint8 [R, 8 * M]; `order[i]` is the place of nibble i among its eight."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).view(len(words), -1)
