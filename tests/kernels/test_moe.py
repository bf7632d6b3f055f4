"""Routing and experts against the formulas written out, and row by row the same bits."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.gated_product import clamped_swiglu_mul
from appliance.kernels.linear import linear, row_tiles
from appliance.kernels.moe import route, run_experts

EPS32 = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (32, 4), (5, 5), (3, 1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_probabilities_of_the_most_likely(experts: int, top_k: int, normalised: bool) -> None:
    logits = torch.randn(33, experts) * 5
    chosen, weights = route(logits, top_k, normalised)
    p, order = logits.double().softmax(-1).sort(descending=True)
    expected = p[:, :top_k] / (p[:, :top_k].sum(-1, keepdim=True) if normalised else 1)
    assert torch.equal(chosen, order[:, :top_k])
    # Numerators and sums of positive terms are each good to a few units in the last place.
    assert ((weights - expected).abs() <= 8 * EPS32 * experts**0.5 * expected).all()


def test_large_logits_do_not_overflow() -> None:
    chosen, weights = route(torch.tensor([[3e4, -3e4, 3e4 - 1.0]]), 2, True)
    assert chosen.tolist() == [[0, 2]]
    assert torch.allclose(
        weights, torch.tensor([[1.0, 0.0]]) + torch.tensor([[-1, 1]]) * torch.sigmoid(torch.tensor(-1.0))
    )


def test_a_rows_experts_do_not_depend_on_its_neighbours() -> None:
    width, experts, top_k = 96, 16, 4
    matrices = [torch.randn(width, 48) for _ in range(experts)]
    tiles = row_tiles(width, 48)
    x, logits = torch.randn(70, width), torch.randn(70, experts)

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, matrices[expert], None, tiles)

    chosen, weights = route(logits, top_k, True)
    together = run_experts(x, chosen, weights, run)
    exact = sum(
        weights[:, k, None].double()
        * torch.stack(
            [row.double() @ matrices[e].double() for row, e in zip(x, chosen[:, k].tolist(), strict=True)]
        )
        for k in range(top_k)
    )
    assert isinstance(exact, torch.Tensor)
    assert (together - exact).abs().max() < 8 * EPS32 * width**0.5 * exact.abs().max()
    for rows in ([0], [1, 2, 3], list(range(69, 0, -2)), [5] * 17):
        some, some_weights = route(logits[rows], top_k, True)
        assert torch.equal(run_experts(x[rows], some, some_weights, run), together[rows])
    assert run_experts(x[:0], chosen[:0], weights[:0], run).shape[0] == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("experts", [8, 33, 128])
def test_routes_do_not_depend_on_how_threads_share_rows(threads: int, experts: int) -> None:
    before = torch.get_num_threads()
    logits = torch.randn(700, experts)
    try:
        torch.set_num_threads(threads)
        for normalised in (True, False):
            together = route(logits, 4, normalised)
            alone = [route(logits[i : i + 1], 4, normalised) for i in range(700)]
            for part, both in enumerate(together):
                assert torch.equal(torch.cat([one[part] for one in alone]), both)
    finally:
        torch.set_num_threads(before)


def test_clamped_gates_agree_with_the_formula() -> None:
    gate, up = torch.randn(9, 77) * 6, torch.randn(9, 77) * 6
    g, u = gate.double().clamp(max=7), up.double().clamp(-7, 7)
    expected = g * torch.sigmoid(1.702 * g) * (u + 1)
    got = clamped_swiglu_mul(torch.cat([gate, up], dim=1), 1.702, 7.0)
    assert (got - expected).abs().max() < 8 * EPS32 * expected.abs().max()
    assert torch.equal(
        clamped_swiglu_mul(torch.tensor([[-500.0, 9.0, 0.0, -9.0]]), 1.0, 7.0)[0, :1], torch.zeros(1)
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("width", [33, 2880, 8192])
def test_clamped_gates_do_not_depend_on_how_threads_share_them(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    x = torch.randn(32, 2 * width) * 4
    try:
        torch.set_num_threads(threads)
        together = clamped_swiglu_mul(x, 1.702, 7.0)
        alone = torch.cat([clamped_swiglu_mul(x[i : i + 1], 1.702, 7.0) for i in range(32)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
