"""Products with packed weights by the GPU's kernels, interpreted, against the canonical weights.

Outputs lie within a larger tensor of NaNs and so do inputs; temporary memory is NaN too until it is written.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_weights import GPU_SCHEMES, random_gpu_weight

from appliance.kernels.linear.gpu import (
    TILES,
    TILES_OF_HOPPER,
    Tile,
    candidates,
    multiply,
    tiles,
)
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.kernels.linear.gpu_split import num_splits
from appliance.quant.gpu_packed import pack_for_gpu
from appliance.quant.tensor import QuantTensor

# Outputs, inputs, size of a group.
SHAPES = (
    (1, 1, 16),
    (65, 168, 16),
    (33, 256, 128),
    (64, 320, 64),
    (7, 576, 576),
    (3, 600, 256),
    (130, 128, 32),
)
DTYPES = (torch.float16, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("poisoned")


def packed(weight: QuantTensor) -> GpuMatrix:
    matrix = pack_for_gpu(weight)
    assert matrix is not None
    return matrix


def amid_nans(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.full((rows + 2, columns + 5), float("nan"), dtype=dtype)
    return whole[1 : rows + 1, 2 : columns + 2]


def random_x(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return amid_nans(rows, columns, dtype).copy_(torch.randn(rows, columns))


def product(
    weight: QuantTensor, x: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """float32, and nothing beyond it was written."""
    out = amid_nans(len(x), weight.shape[0], torch.float32)
    assert multiply(packed(weight), x, bias=bias, out=out, tile=tile) is out
    whole = out._base
    assert whole is not None
    assert whole.isnan().sum() == whole.numel() - out.numel()
    return out


def assert_product(weight: QuantTensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    result = product(weight, x, bias)
    weights = weight.dequantize().double()
    expected = x.double() @ weights.t() + (0 if bias is None else bias)
    # What is added up is as large as the largest code times its scale, whatever is taken off.
    scales = weight.scales.double().abs().amax(1) * (1 if weight.sub_scales is None else 128)
    terms = x.double().abs().sum(1, keepdim=True) * (weights.abs().amax(1) + 255 * scales)
    tolerance = 2 * torch.finfo(torch.float32).eps * weight.shape[1] ** 0.5 * terms
    assert ((result - expected).abs() <= tolerance).all(), ((result - expected).abs() / tolerance).max()


@pytest.mark.parametrize("name", GPU_SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_weights(name: str, dtype: torch.dtype) -> None:
    weight = random_gpu_weight(name, 35, 168, 32)
    assert_product(weight, random_x(3, 168, dtype), torch.randn(35))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["zp4", "affine4", "iq4_nl", "zp8", "zp2"])
def test_any_shape_and_group(name: str, shape: tuple[int, int, int]) -> None:
    assert_product(random_gpu_weight(name, *shape), random_x(2, shape[1]))


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 17, 33, 130])
@pytest.mark.parametrize("name", ["zp4", "kquant4", "kquant6", "kquant2"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    assert_product(random_gpu_weight(name, 67, 136, 32), random_x(rows, 136))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["sym4", "affine4", "kquant4"])
def test_other_scales(name: str, dtype: torch.dtype) -> None:
    for group_size in (32, 256):
        assert_product(random_gpu_weight(name, 34, 320, group_size, dtype), random_x(2, 320))


@pytest.mark.parametrize("group_size", [16, 48])
@pytest.mark.parametrize("name", ["zp4", "affine4"])
def test_permuted_inputs(name: str, group_size: int) -> None:
    weight = random_gpu_weight(name, 18, 200, group_size)
    weight = dataclasses.replace(weight, permutation=torch.randperm(200))
    assert_product(weight, random_x(3, 200))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_rounded_to_the_type_of_x(dtype: torch.dtype) -> None:
    weight, x = random_gpu_weight("zp4", 20, 64, 32), random_x(2, 64, dtype)
    result = multiply(packed(weight), x)
    assert result.dtype is dtype
    # The interpreter cuts bfloat16 where the device rounds it.
    exact = product(weight, x)
    assert ((result.float() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()


def test_every_tile_gives_the_same_bits() -> None:
    """But for the order within a group, in which it is the tensor cores that add: sums there are exact here."""
    weight, x = random_gpu_weight("affine4", 40, 2048, 128), torch.randint(-8, 9, (3, 2048)).half()
    assert num_splits(*packed(weight).codes.shape[:2]) == 2
    bias = torch.randn(40)
    usual = product(weight, x, bias)
    # As many warps and stages as there may be, they are interpreted in the same way.
    different = {(each.x_rows, each.matrix_rows, each.splits_inside) for each in TILES + TILES_OF_HOPPER}
    for x_rows, matrix_rows, splits_inside in different:
        assert torch.equal(product(weight, x, bias, Tile(x_rows, matrix_rows, 2, 4, splits_inside)), usual)


@pytest.mark.parametrize("tile", [TILES[0], TILES[6], TILES[9]], ids=lambda tile: str(tile.x_rows))
def test_a_row_is_the_same_whatever_its_neighbours_are(tile: Tile) -> None:
    weight, x = random_gpu_weight("affine4", 66, 256, 32), random_x(tile.x_rows + 3, 256)
    whole = product(weight, x, tile=tile)
    for rows in (1, 5, tile.x_rows):
        assert torch.equal(product(weight, x[:rows], tile=tile), whole[:rows])


def test_the_smallest_tiles_that_hold_the_rows() -> None:
    matrix = packed(random_gpu_weight("zp4", 1, 1, 32))
    for rows, size in ((1, 8), (8, 8), (9, 16), (32, 32), (33, 64)):
        assert candidates(matrix, rows) == tuple(tile for tile in TILES if tile.x_rows == size)
    assert candidates(matrix, 65) == candidates(matrix, 4096) == TILES[-2:]
    assert candidates(packed(random_gpu_weight("zp4", 1, 32, 16)), 65) == TILES[-1:]


def test_warp_groups_are_left_alone_where_they_multiply_otherwise() -> None:
    assert all(tile.warps < 4 or tile.matrix_rows < 64 for tile in tiles(9, 128))
    assert tiles(8, 32) == tiles(12, 32) == TILES
