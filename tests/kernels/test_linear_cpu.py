"""Native products with packed weights: every scheme and instruction set against the canonical weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from random_weights import SCHEMES, random_weight

from appliance.kernels import native
from appliance.kernels.linear import cpu
from appliance.kernels.linear.cpu import MatrixLayout, PackedMatrix, Precision
from appliance.quant.packed import pack
from appliance.quant.packing import packed_bytes
from appliance.quant.tensor import DenseTensor, Weight

ISAS = ("portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Outputs, inputs and size of a group: whole and partial blocks, groups and chunks, and groups that need padding.
SHAPES = ((1, 1, 16), (5, 31, 32), (16, 64, 64), (17, 100, 48), (33, 608, 32), (20, 320, 128), (16, 600, 600))


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_isa(request.param) as there:
        if not there:
            pytest.skip(f"no {request.param} here")
        yield request.param


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def allocate(size: int) -> torch.Tensor:
    """Aligned, and not zeros."""
    raw = torch.full((size + cpu.ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -raw.data_ptr() % cpu.ALIGNMENT
    return raw[start : start + size]


def rounded(matrix: PackedMatrix, x: torch.Tensor, precision: Precision) -> torch.Tensor:
    """What a product multiplies: of int8, groups of 32 columns of the matrix, each with a scale."""
    if precision == "bf16":
        return x.bfloat16().float()
    if precision == "float32" or matrix.layout.codes not in ("u4", "u8"):
        return x
    layout = matrix.layout
    inputs = torch.arange(layout.columns) if matrix.inputs is None else matrix.inputs.long()
    places = ((inputs >= 0) & (inputs < layout.input_width)).nonzero().flatten()
    columns = x.new_zeros(len(x), layout.columns)
    columns[:, places] = x[:, inputs[places]]
    groups = columns.unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    codes = (groups * (127 / largest).nan_to_num(0, 0, 0)).round()
    result = torch.empty_like(x)
    result[:, inputs[places]] = (codes * (largest / 127)).flatten(1)[:, places]
    assert ((result - x).abs() <= x.abs().amax(1, keepdim=True) / 127 * 0.5001).all()
    return result


def largest_offset(weight: Weight) -> torch.Tensor:
    """Codes are multiplied before the offset is taken off, and neither is larger than this times the scale."""
    if isinstance(weight, DenseTensor):
        return torch.zeros(weight.shape[0])
    of_sub_scale = 1 if weight.sub_scales is None else 128
    return 255 * of_sub_scale * weight.scales.float().abs().amax(1)


def assert_product(weight: Weight, x: torch.Tensor, precision: Precision) -> None:
    matrix = pack(weight, allocate)
    result = cpu.multiply(matrix, x, precision)
    assert result.shape == (len(x), weight.shape[0])
    weights = weight.dequantize().double()
    expected = rounded(matrix, x, precision).double() @ weights.t()
    terms = x.abs().double().sum(1, keepdim=True) * (weights.abs().amax(1) + largest_offset(weight))
    tolerance = 2 * torch.finfo(torch.float32).eps * weight.shape[1] ** 0.5 * terms
    assert ((result - expected).abs() <= tolerance).all(), ((result - expected).abs() / tolerance).max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_those_of_the_weights(name: str, shape: tuple[int, int, int]) -> None:
    weight = random_weight(name, *shape)
    for precision in PRECISIONS:
        for rows in (0, 1, 5):
            assert_product(weight, torch.randn(rows, shape[1]), precision)


@pytest.mark.parametrize("rows", [2, 12, 13, 33, 200])
@pytest.mark.parametrize("name", ["sym4", "affine4", "iq4_nl", "kquant6", "e4m3"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    weight = random_weight(name, 19, 544, 32)
    for precision in PRECISIONS:
        assert_product(weight, torch.randn(rows, 544), precision)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (17, 31), (40, 576)])
def test_dense_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = DenseTensor(torch.randn(shape).to(dtype))
    for precision in PRECISIONS:
        for rows in (1, 5, 13):
            assert_product(weight, torch.randn(rows, shape[1]), precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["sym4", "zp4", "affine4", "kquant4", "iq4_xs"])
def test_scales_keep_their_type(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(name, 18, 320, 32, dtype)
    matrix = pack(weight, allocate)
    assert torch.equal(cpu.read_rows(matrix, torch.arange(18)), weight.dequantize())
    assert_product(weight, torch.randn(3, 320), "int8")


@pytest.mark.parametrize("group_size", [32, 40])
def test_inputs_in_another_order(group_size: int) -> None:
    weight = dataclasses.replace(random_weight("zp4", 18, 200, group_size), permutation=torch.randperm(200))
    assert torch.equal(cpu.read_rows(pack(weight, allocate), torch.arange(18)), weight.dequantize())
    for precision in PRECISIONS:
        assert_product(weight, torch.randn(3, 200), precision)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_read_without_loss(name: str, shape: tuple[int, int, int]) -> None:
    weight = random_weight(name, *shape)
    matrix = pack(weight, allocate)
    index = torch.cat([torch.arange(shape[0]), torch.tensor([0])]).flip(0)
    assert torch.equal(cpu.read_rows(matrix, index), weight.dequantize()[index])


def test_dense_rows_are_read_without_loss() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        data = torch.randn(21, 45).to(dtype)
        assert torch.equal(cpu.read_rows(pack(DenseTensor(data), allocate), torch.arange(21)), data.float())


@pytest.mark.parametrize("name", ["sym4", "zp6", "iq4_nl", "kquant4", "e4m3"])
def test_a_row_is_the_same_whatever_the_others(name: str) -> None:
    matrix = pack(random_weight(name, 35, 608, 64), allocate)
    x = torch.randn(250, 608)
    for precision in PRECISIONS:
        alone = torch.cat([cpu.multiply(matrix, row, precision) for row in x.split(1)])
        for rows in (*range(2, 26), 49, 193, 250):
            first = 250 - rows
            assert torch.equal(cpu.multiply(matrix, x[first:], precision), alone[first:]), (precision, rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["sym4", "zp8", "e4m3"])
def test_what_is_not_a_number_spoils_its_row_only(name: str, bad: float) -> None:
    matrix = pack(random_weight(name, 17, 96, 32), allocate)
    for precision in PRECISIONS:
        x = torch.randn(13, 96)
        clean = cpu.multiply(matrix, x, precision)
        x[4, 70] = bad
        spoilt = cpu.multiply(matrix, x, precision)
        assert not spoilt[4].isfinite().any()
        others = torch.arange(13) != 4
        assert torch.equal(spoilt[others], clean[others])


def test_the_least_and_the_largest_activations() -> None:
    weight = random_weight("sym4", 16, 64, 32)
    matrix = pack(weight, allocate)
    for scale in (0.0, 1e-45, 1e-38, 1e-30, 1e34):
        result = cpu.multiply(matrix, torch.full((1, 64), scale), "int8")
        assert torch.allclose(result, scale * weight.dequantize().sum(1), rtol=1e-4, atol=1e-28)


def test_targets() -> None:
    """Some blocks of a partial matrix into wider rows, as they are or added; nothing else is written."""
    matrix = pack(random_weight("affine4", 37, 64, 32), allocate)
    x, bias, before = torch.randn(5, 64), torch.randn(37), torch.randn(5, 50)
    product = cpu.multiply(matrix, x, "int8")
    for add, blocks in ((0, range(3)), (1, range(3)), (1, range(1, 2)), (0, range(2, 3)), (0, range(2, 2))):
        out = before.clone()
        target = cpu.Target(out.data_ptr(), 50, add, 0.25, bias.data_ptr())
        cpu.multiply_into(matrix, x, "int8", target, blocks)
        expected = before.clone()
        columns = slice(16 * blocks.start, min(37, 16 * blocks.stop))
        y = product[:, columns] + bias[columns]
        expected[:, columns] = (before[:, columns].double() + 0.25 * y.double()).float() if add else y
        assert torch.equal(out, expected)


def test_layouts_survive_json() -> None:
    layout = pack(random_weight("iq4_xs", 17, 300, 32), allocate).layout
    again = MatrixLayout.from_fields(json.loads(json.dumps(dataclasses.asdict(layout))))
    assert again == layout
    # Two blocks of two headers and ten groups with their codes and sub-scales.
    assert again.nbytes == 2 * (2 * 32 + 10 * (32 * 8 + 16))


def test_partial_bytes_of_codes() -> None:
    assert packed_bytes(31, 5) == 20
    weight = random_weight("sym5", 3, 31, 32)
    assert torch.equal(cpu.read_rows(pack(weight, allocate), torch.arange(3)), weight.dequantize())
