"""Packed codes into another order: what loading most checkpoints spends its time on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from appliance.kernels import native
from appliance.kernels.repack import cpu, reference


def transpose_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [M, N] → int32 [N, M]."""
    lib = native.library()
    return reference.transpose_words(words) if lib is None else cpu.transpose_words(lib, words)


def transpose_nibbles(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """int32 [K, M] → int32 [M, 8, K / 8]: nibble k % 8 of [m, order[i], k // 8] was nibble i of [k, m].

    K must be a multiple of 8, `order` a permutation of 0 … 7.
    """
    lib = native.library()
    if lib is None:
        return reference.transpose_nibbles(words, order)
    return cpu.transpose_nibbles(lib, words, order)


def reorder_codes(packed: torch.Tensor, permutation: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the codes of each row into another order: code j becomes what code permutation[j] was.

    Args:
        packed: uint8 [N, ceil(K * bits / 8)], contiguous, streams of bits with the least significant first;
            may be overwritten.
        permutation: int64 [K].
        bits: 1 to 8.
    """
    lib = native.library()
    if lib is None:
        return reference.reorder_codes(packed, permutation, bits)
    return cpu.reorder_codes(lib, packed, permutation, bits)
