"""The dense product: right, and each row the same whatever the number of rows."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.linear import linear, row_tiles

SHAPES = [(576, 960), (576, 576), (1536, 576), (128, 128), (33, 7), (2048, 512), (1, 1)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_agrees_with_float64(k: int, n: int) -> None:
    x, weight_t, bias = torch.randn(19, k), torch.randn(k, n), torch.randn(n)
    exact = x.double() @ weight_t.double() + bias.double()
    got = linear(x, weight_t, bias, row_tiles(k, n))
    # Rounding of a dot product grows like sqrt(k) for random signs; each term is of the order of 1.
    tolerance = 8 * torch.finfo(torch.float32).eps * k**0.5
    assert (got - exact).abs().max() < tolerance * exact.abs().mean().clamp(min=1)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_row_is_the_same_bits_in_any_number_of_rows(k: int, n: int) -> None:
    x, weight_t = torch.randn(150, k), torch.randn(k, n)
    tiles = row_tiles(k, n)
    whole = linear(x, weight_t, None, tiles)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129):
        assert torch.equal(linear(x[:rows], weight_t, None, tiles), whole[:rows]), rows
        assert torch.equal(linear(x[150 - rows :], weight_t, None, tiles), whole[150 - rows :]), rows


def test_the_tiles_of_a_shape_hold_for_any_weights() -> None:
    k, n = 257, 1031  # a shape that nothing else here has
    tiles = row_tiles(k, n)
    x, weight_t = torch.randn(65, k), torch.randn(k, n)
    assert torch.equal(linear(x[:1], weight_t, None, tiles), linear(x, weight_t, None, tiles)[:1])


def test_no_rows() -> None:
    weight_t = torch.randn(32, 8)
    assert linear(torch.empty(0, 32), weight_t, torch.randn(8), row_tiles(32, 8)).shape == (0, 8)
