"""Products with dense weights by the GPU's kernel, interpreted; what surrounds inputs and outputs is NaN."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.linear.gpu_dense import BLOCK, TILES, Tile, multiply_dense, splits_for

DTYPES = (torch.float16, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("poisoned")


def amid_nans(values: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    whole = torch.full((rows + 2, columns + 5), float("nan"), dtype=values.dtype)
    return whole[1 : rows + 1, 2 : columns + 2].copy_(values)


def product(
    weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """float32, and nothing beyond it was written."""
    out = amid_nans(torch.full((len(x), len(weight)), float("nan")))
    assert multiply_dense(weight, amid_nans(x), bias=bias, out=out, tile=tile) is out
    whole = out._base
    assert whole is not None
    assert whole.isnan().sum() == whole.numel() - out.numel()
    return out


def assert_product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias)
    terms = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.abs())
    eps = torch.finfo(torch.float32).eps
    assert ((product(weight, x, bias) - expected).abs() <= eps * weight.shape[1] ** 0.5 * terms).all()


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Products of two of them are exact within a block, and rounded from block to block."""
    blocks = -(-columns // BLOCK)
    scales = 2.0 ** torch.randint(-8, 8, (rows, blocks)).repeat_interleave(BLOCK, 1)[:, :columns]
    return torch.randint(-7, 8, (rows, columns)) * scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (65, 168), (7, 577), (130, 64), (64, 1000)], ids=str)
def test_any_shape(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_product(torch.randn(shape).to(dtype), torch.randn(3, shape[1]).to(dtype), torch.randn(shape[0]))


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 65, 150])
def test_any_number_of_rows(rows: int) -> None:
    assert_product(torch.randn(150, 72).half(), torch.randn(rows, 72).half())


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: str(tile.x_rows))
def test_a_row_is_the_same_whatever_its_neighbours_are(tile: Tile) -> None:
    weight, x = torch.randn(66, 200).half(), torch.randn(tile.x_rows + 3, 200).half()
    whole = product(weight, x, tile=tile)
    for rows in (1, 5, tile.x_rows):
        assert torch.equal(product(weight, x[:rows], tile=tile), whole[:rows])


@pytest.mark.parametrize(("columns", "bias"), [(600, False), (1056, False), (1056, True)])
def test_columns_are_added_up_in_the_same_order_at_any_number_of_rows(columns: int, bias: bool) -> None:
    assert splits_for(70, 600) == 1
    assert splits_for(70, 1056) == 2
    weight, x, added = uneven(70, columns).half(), uneven(130, columns).half(), torch.randn(70)
    whole = product(weight, x, added if bias else None)
    for rows in (1, 17, 64):
        assert torch.equal(product(weight, x[-rows:], added if bias else None), whole[-rows:])
    # Else any order would do.
    turned = product(weight.flip(1), x.flip(1), added if bias else None)
    assert not torch.equal(turned, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_rounded_to_the_type_of_x(dtype: torch.dtype) -> None:
    weight, x = torch.randn(20, 64).to(dtype), torch.randn(2, 64).to(dtype)
    result = multiply_dense(weight, x)
    assert result.dtype is dtype
    # The interpreter cuts bfloat16 where the device rounds it.
    exact = product(weight, x)
    assert ((result.float() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()
