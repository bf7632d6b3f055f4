"""Repacking: what each implementation does against codes moved one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest
import torch

from appliance.kernels import native
from appliance.kernels.repack import cpu, reference


class Implementation(Protocol):
    def transpose_words(self, words: torch.Tensor) -> torch.Tensor: ...

    def transpose_nibbles(self, words: torch.Tensor, order: Sequence[int]) -> torch.Tensor: ...

    def reorder_codes(self, packed: torch.Tensor, permutation: torch.Tensor, bits: int) -> torch.Tensor: ...


class Native:
    """The native library, with the functions that the reference has."""

    def __init__(self) -> None:
        lib = native.library()
        assert lib is not None
        self._lib = lib

    def transpose_words(self, words: torch.Tensor) -> torch.Tensor:
        return cpu.transpose_words(self._lib, words)

    def transpose_nibbles(self, words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return cpu.transpose_nibbles(self._lib, words, order)

    def reorder_codes(self, packed: torch.Tensor, permutation: torch.Tensor, bits: int) -> torch.Tensor:
        return cpu.reorder_codes(self._lib, packed, permutation, bits)


@pytest.fixture(params=["reference", "native"])
def repack(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "reference":
        return reference
    if native.library() is None:
        pytest.skip(native.NOT_BUILT)
    return Native()


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (16, 64), (33, 130), (512, 7)])
def test_words_are_transposed(repack: Implementation, shape: tuple[int, int]) -> None:
    given = words(*shape)
    turned = repack.transpose_words(given)
    assert turned.is_contiguous()
    assert torch.equal(turned, given.t())


@pytest.mark.parametrize("shape", [(8, 1), (16, 16), (136, 17), (128, 33), (264, 5)])
def test_nibbles_are_transposed(repack: Implementation, shape: tuple[int, int]) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    given = words(*shape)
    turned = repack.transpose_nibbles(given.clone(), order)
    assert turned.shape == (shape[1], 8, shape[0] // 8)
    for nibble, place in enumerate(order):
        for lane in range(8):
            stored = turned[:, place] >> (4 * lane) & 15
            assert torch.equal(stored, (given[lane::8] >> (4 * nibble) & 15).t())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [1, 8, 40, 129])
def test_codes_are_reordered(repack: Implementation, bits: int, columns: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, columns))
    permutation = torch.randperm(columns)

    def packed(rows: torch.Tensor) -> torch.Tensor:
        streams = [sum(int(code) << (bits * place) for place, code in enumerate(row)) for row in rows]
        nbytes = -(-columns * bits // 8)
        return torch.tensor(
            [list(stream.to_bytes(nbytes, "little")) for stream in streams], dtype=torch.uint8
        )

    reordered = repack.reorder_codes(packed(codes), permutation, bits)
    assert torch.equal(reordered, packed(codes[:, permutation]))
