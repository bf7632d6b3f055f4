"""Weights of every scheme in the layout of the GPU kernels, and back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_weights import GPU_SCHEMES, random_gpu_weight

from appliance.kernels.linear.gpu_matrix import GpuMatrix, unpack, unpack_codes
from appliance.quant.gpu_packed import pack_for_gpu
from appliance.quant.packing import unpack_codes as unpack_stream
from appliance.quant.tensor import QuantTensor

# Outputs, inputs and size of a group: partial tiles and blocks, groups that fit, that are padded, that are all inputs.
SHAPES = (
    (1, 1, 16),
    (65, 31, 16),
    (64, 200, 32),
    (3, 300, 64),
    (130, 256, 128),
    (5, 576, 576),
    (7, 600, 256),
    (9, 100, 48),
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def of_inputs(matrix: GpuMatrix, columns: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of the matrix → [rows, inputs], each column where its input is."""
    if matrix.inputs is None:
        return columns
    used = matrix.inputs >= 0
    assert sorted(matrix.inputs[used].tolist()) == list(range(matrix.input_width))
    placed = columns.new_empty(len(columns), matrix.input_width)
    placed[:, matrix.inputs[used].long()] = columns[:, used]
    return placed


def packed(weight: QuantTensor) -> GpuMatrix:
    matrix = pack_for_gpu(weight)
    assert matrix is not None
    return matrix


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GPU_SCHEMES)
def test_weights_come_back_bit_for_bit(name: str, shape: tuple[int, int, int]) -> None:
    weight = random_gpu_weight(name, *shape)
    matrix = packed(weight)
    assert torch.equal(of_inputs(matrix, unpack(matrix)), weight.dequantize())
    codes = unpack_stream(weight.codes, weight.scheme.bits, weight.shape[1])
    assert torch.equal(of_inputs(matrix, unpack_codes(matrix)), codes)


@pytest.mark.parametrize("group_size", [32, 48])
def test_permuted_inputs(group_size: int) -> None:
    weight = random_gpu_weight("zp4", 18, 200, group_size)
    weight = dataclasses.replace(weight, permutation=torch.randperm(200))
    assert torch.equal(of_inputs(packed(weight), unpack(packed(weight))), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_scales(dtype: torch.dtype) -> None:
    weight = random_gpu_weight("kquant4", 18, 320, 32, dtype)
    assert torch.equal(unpack(packed(weight)), weight.dequantize())


def test_zero_points_that_no_format_has() -> None:
    weight = random_gpu_weight("zp4", 3, 64, 32)
    assert weight.zeros is not None
    weight.zeros[1, 1] = 127
    assert torch.equal(unpack(packed(weight)), weight.dequantize())
    weight.zeros[1, 1] = 128
    with pytest.raises(AssertionError, match="a zero point above 127"):
        packed(weight)


def test_where_a_code_is() -> None:
    """Column 128 b + 32 i + 2 r + h of row 64 t + n: nibble i + 4 h of word r; with a table nibble 2 i + h."""
    for name, nibble in (("sym4", 3 + 4 * 1), ("iq4_nl", 2 * 3 + 1)):
        weight = random_gpu_weight(name, 70, 256, 32)
        words = packed(weight).codes
        assert words.shape == (2, 2, 64, 16)
        code = unpack_stream(weight.codes, 4, 256)[64 + 5, 128 + 32 * 3 + 2 * 9 + 1]
        assert words[1, 1, 5, 9] >> 4 * nibble & 15 == code
    weight = random_gpu_weight("sym8", 70, 128, 32)
    assert packed(weight).codes[1, 1, 5, 9] >> 8 * 3 & 255 == weight.codes[64 + 5, 64 + 32 * 1 + 2 * 9 + 1]


def test_code_books_of_8_bits_are_left_to_others() -> None:
    assert pack_for_gpu(random_gpu_weight("e4m3", 4, 64, 32)) is None
