"""Repacking in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Codes of a byte each take eight times the room of their bits: so many words at once.
_CHUNK_WORDS = 1 << 18


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    return words.t().contiguous()


def transpose_nibbles(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    rows, width = words.shape
    out = words.new_empty(width, 8, rows // 8)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    size = max(1, _CHUNK_WORDS // rows)
    for columns, target in zip(torch.split(words, size, 1), torch.split(out, size), strict=True):
        for nibble, place in enumerate(order):
            codes = (columns >> (4 * nibble)) & 15
            target[:, place] = (codes.t().reshape(-1, rows // 8, 8) << shifts).sum(-1, dtype=torch.int32)
    return out


def reorder_codes(packed: torch.Tensor, permutation: torch.Tensor, bits: int) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8)
    wanted = (permutation.unsqueeze(1) * bits + torch.arange(bits)).flatten()
    wanted = torch.nn.functional.pad(wanted, (0, -len(wanted) % 8), value=-1)
    reordered = torch.empty_like(packed)
    for row, out in zip(packed, reordered, strict=True):
        # The last bit of all is a zero, for what is left of the last byte.
        stream = torch.nn.functional.pad((row.unsqueeze(1) >> places & 1).flatten(), (0, 1))
        out.copy_((stream[wanted].view(-1, 8) << places).sum(1))
    return reordered
