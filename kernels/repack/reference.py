"""Repacking in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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
    for columns, target in zip(words.split(size, dim=1), out.split(size), strict=True):
        for nibble, place in enumerate(order):
            codes = (columns >> (4 * nibble)) & 15
            target[:, place] = (codes.t().reshape(-1, rows // 8, 8) << shifts).sum(-1, dtype=torch.int32)
    return out


def reorder_codes(packed: torch.Tensor, permutation: torch.Tensor, bits: int) -> torch.Tensor:
    columns = len(permutation)
    reordered = torch.empty_like(packed)
    for row, out in zip(packed.numpy(), reordered.numpy(), strict=True):
        fields = np.unpackbits(row, bitorder="little")[: columns * bits].reshape(columns, bits)
        out[:] = np.packbits(fields[permutation.numpy()], bitorder="little")
    return reordered
