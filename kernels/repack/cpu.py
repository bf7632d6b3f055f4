"""Repacking by the native library; calls release the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def transpose_words(lib: ctypes.CDLL, words: torch.Tensor) -> torch.Tensor:
    words = _checked(words, torch.int32)
    out = words.new_empty(words.shape[1], words.shape[0])
    lib.appliance_transpose_words(_pointer(words), _pointer(out), _size(words, 0), _size(words, 1))
    return out


def transpose_nibbles(lib: ctypes.CDLL, words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    words = _checked(words, torch.int32)
    assert words.shape[0] % 8 == 0
    assert sorted(order) == list(range(8))
    out = words.new_empty(words.shape[1], 8, words.shape[0] // 8)
    places = (ctypes.c_int32 * 8)(*order)
    lib.appliance_transpose_nibbles(_pointer(words), _pointer(out), _size(words, 0), _size(words, 1), places)
    return out


def reorder_codes(
    lib: ctypes.CDLL, packed: torch.Tensor, permutation: torch.Tensor, bits: int
) -> torch.Tensor:
    packed, columns = _checked(packed, torch.uint8), len(permutation)
    assert packed.shape[1] == -(-columns * bits // 8)
    assert permutation.dtype is torch.int64
    assert 0 <= int(permutation.min()) <= int(permutation.max()) < columns
    lib.appliance_reorder_codes(
        _pointer(packed),
        _size(packed, 0),
        _size(packed, 1),
        _pointer(permutation.contiguous()),
        ctypes.c_size_t(columns),
        ctypes.c_uint(bits),
    )
    return packed


def _checked(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert tensor.dtype is dtype
    assert tensor.dim() == 2
    return tensor.contiguous()


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _size(tensor: torch.Tensor, dim: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.shape[dim])
