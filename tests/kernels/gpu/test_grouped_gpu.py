"""Products with the matrices of chosen experts, and mixtures of them, by the GPU's kernels, interpreted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_weights import random_gpu_weight

from appliance.kernels import gated_product as products
from appliance.kernels.linear import gpu, gpu_dense
from appliance.kernels.linear.gpu_grouped import ExpertMatrices, multiply_grouped, stack
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.kernels.linear.gpu_split import num_splits
from appliance.kernels.moe import run_experts as experts_reference
from appliance.kernels.moe.gpu import run_experts, sort_by_expert
from appliance.quant.gpu_packed import pack_for_gpu
from appliance.quant.tensor import QuantTensor

pytestmark = pytest.mark.usefixtures("poisoned")


def amid_nans(values: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    whole = torch.full((rows + 2, columns + 16), float("nan"), dtype=values.dtype)
    return whole[1 : rows + 1, :columns].copy_(values)


def empty_out(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return amid_nans(torch.full((rows, columns), float("nan"), dtype=dtype))


def assert_written(out: torch.Tensor) -> None:
    """Every element, and nothing around."""
    whole = out._base
    assert whole is not None
    assert out.isfinite().all()
    assert whole.isnan().sum() == whole.numel() - out.numel()


def packed(weight: QuantTensor) -> GpuMatrix:
    matrix = pack_for_gpu(weight)
    assert matrix is not None
    return matrix


def quantised(name: str, experts: int, rows: int, columns: int, permuted: bool = False) -> list[QuantTensor]:
    weights = [random_gpu_weight(name, rows, columns, 32) for _ in range(experts)]
    # The first one's inputs stay in their order.
    for expert in range(1, experts if permuted else 1):
        weights[expert] = dataclasses.replace(weights[expert], permutation=torch.randperm(columns))
    return weights


def stacked(weights: list[QuantTensor]) -> ExpertMatrices:
    found = stack([packed(weight) for weight in weights])
    assert found is not None
    return found


def choose(rows: int, experts: int, top_k: int, avoided: int = -1) -> torch.Tensor:
    likelihoods = torch.rand(rows, experts)
    if avoided >= 0:
        likelihoods[:, avoided] = -1.0
    return likelihoods.topk(top_k).indices.int()


def whole_numbers(rows: int, columns: int) -> torch.Tensor:
    """float16, of which sums of a group are exact, whatever is multiplied beside a row."""
    return torch.randint(-8, 9, (rows, columns)).half()


def assert_as_alone(
    out: torch.Tensor, chosen: torch.Tensor, multiply: Callable[[int, torch.Tensor], Any]
) -> None:
    """out[choice] is bit for bit what `multiply` makes of the choice's expert and the choices that there are."""
    for expert in set(chosen.flatten().tolist()):
        found = (chosen.flatten() == expert).nonzero().flatten()
        assert torch.equal(out[found], multiply(expert, found))


@pytest.mark.parametrize(
    ("name", "top_k"),
    [
        *((name, 2) for name in ("zp4", "affine4", "kquant4", "iq4_nl", "kquant6", "permuted", "padded")),
        ("zp4", 1),
    ],
)
def test_rows_are_bit_for_bit_those_of_their_experts_alone(name: str, top_k: int) -> None:
    if name == "padded":
        weights = [random_gpu_weight("zp4", 34, 136, 48) for _ in range(4)]
    else:
        weights = quantised("affine4" if name == "permuted" else name, 4, 34, 136, name == "permuted")
    bias, chosen = torch.randn(4, 34), choose(4, 4, 2, avoided=2)
    x, out = amid_nans(whole_numbers(8 // top_k, 136)), empty_out(8, 34)
    multiply_grouped(stacked(weights), x, *sort_by_expert(chosen, 4), out=out, top_k=top_k, bias=bias)
    assert_written(out)
    assert_as_alone(
        out,
        chosen,
        lambda expert, found: gpu.multiply(
            packed(weights[expert]), x[found // top_k], bias=bias[expert], out=torch.empty(len(found), 34)
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(70, 200), (33, 577), (9, 1056)], ids=str)
def test_rows_of_dense_experts_too(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights, bias = torch.randn(5, *shape).to(dtype), torch.randn(5, shape[0])
    # Each block of columns has a size of its own, so that the order of the sums of blocks matters.
    weights = (weights * 8).round() * 2.0 ** torch.randint(-6, 6, (shape[1] // 64 + 1,)).repeat_interleave(
        64
    )[: shape[1]].to(dtype)
    x, chosen = amid_nans(whole_numbers(7, shape[1]).to(dtype)), choose(7, 5, 3, avoided=0)
    out = empty_out(21, shape[0])
    multiply_grouped(weights, x, *sort_by_expert(chosen, 5), out=out, top_k=3, bias=bias)
    assert_written(out)
    assert_as_alone(
        out,
        chosen,
        lambda expert, found: gpu_dense.multiply_dense(
            weights[expert], x[found // 3], bias=bias[expert], out=torch.empty(len(found), shape[0])
        ),
    )


def test_splits_are_added_in_the_order_of_an_expert_alone() -> None:
    weights, x = [random_gpu_weight("zp4", 9, 2048, 128) for _ in range(2)], whole_numbers(2, 2048)
    assert num_splits(1, 2048 // 128) == 2
    out = empty_out(2, 9)
    multiply_grouped(stacked(weights), x, *sort_by_expert(torch.tensor([[1], [0]]).int(), 2), out=out)
    for row, expert in ((0, 1), (1, 0)):
        alone = gpu.multiply(packed(weights[expert]), x[row : row + 1], out=torch.empty(1, 9))
        assert torch.equal(out[row], alone[0])


@pytest.mark.parametrize("is_dense", [False, True])
def test_several_tiles_of_an_expert(is_dense: bool) -> None:
    weights = quantised("sym4", 3, 65, 128)
    values = torch.stack([weight.dequantize() for weight in weights]).half()
    x, chosen = whole_numbers(90, 128), torch.tensor([1] * 70 + [2] * 19 + [0])[torch.randperm(90)]
    out = empty_out(90, 65)
    multiply_grouped(
        values if is_dense else stacked(weights), x, *sort_by_expert(chosen.int().unsqueeze(1), 3), out=out
    )
    assert_written(out)
    exact = values.double() if is_dense else torch.stack([weight.dequantize() for weight in weights]).double()
    expected = torch.einsum("mk,mnk->mn", x.double(), exact[chosen])
    assert ((out - expected).abs() <= 1e-5 * expected.abs().amax(1, keepdim=True)).all()


def test_only_matrices_of_the_same_layout_are_stacked() -> None:
    first = packed(random_gpu_weight("zp4", 20, 128, 32))
    for other in (
        random_gpu_weight("sym4", 20, 128, 32),
        random_gpu_weight("zp4", 20, 128, 64),
        random_gpu_weight("zp4", 21, 128, 32),
        random_gpu_weight("zp4", 20, 160, 32),
        random_gpu_weight("zp4", 20, 128, 32, torch.bfloat16),
    ):
        assert stack([first, packed(other)]) is None
    tables = [packed(random_gpu_weight(name, 20, 128, 32, torch.bfloat16)) for name in ("iq4_nl", "e2m1")]
    assert stack(tables) is None


EXPERTS = {
    # Rows, experts, top_k, the quantised scheme, whether permuted, biases, activation.
    "one row": (1, 4, 2, "zp4", False, False, "silu"),
    "one choice": (1, 3, 1, "sym4", False, True, "silu"),
    "all experts": (3, 4, 4, "affine4", False, False, "gelu_tanh"),
    "nine of which eight": (1, 9, 8, "", False, False, "silu"),
    "permuted": (5, 3, 2, "zp4", True, True, "silu"),
    "gpt-oss": (2, 5, 4, "e2m1", False, True, "clamped_swiglu"),
    "k-quants": (5, 3, 2, "kquant4", False, False, "gelu"),
    "dense": (7, 5, 2, "", False, False, "silu"),
    "dense with biases": (3, 4, 4, "", False, True, "clamped_swiglu"),
    "no rows": (0, 3, 2, "zp4", False, True, "silu"),
}


@pytest.mark.parametrize("case", EXPERTS.values(), ids=EXPERTS.keys())
def test_mixtures_are_those_of_the_reference(case: tuple[int, int, int, str, bool, bool, str]) -> None:
    rows, experts, top_k, name, permuted, has_bias, activation = case
    width, inner = 72, 40
    biases = (torch.randn(experts, 2 * inner), torch.randn(experts, width)) if has_bias else (None, None)
    if name:
        lists = [quantised(name, experts, *shape, permuted) for shape in ((2 * inner, width), (width, inner))]
        # So that sums are of the size of real ones.
        for each in lists:
            for expert, weight in enumerate(each):
                shrunk = weight.dequantize().abs().amax() * 4
                parts = {"scales": (weight.scales / shrunk).to(weight.scales.dtype)}
                if weight.biases is not None:
                    parts["biases"] = (weight.biases / shrunk).to(weight.biases.dtype)
                each[expert] = dataclasses.replace(weight, **parts)
        gate_ups, downs = (torch.stack([weight.dequantize() for weight in each]) for each in lists)
        matrices: tuple[ExpertMatrices | torch.Tensor, ...] = tuple(stacked(each) for each in lists)
    else:
        halves = [torch.randn(experts, 2 * inner, width) / 9, torch.randn(experts, width, inner) / 6]
        matrices = tuple(half.half() for half in halves)
        gate_ups, downs = (half.half().float() for half in halves)
    x, chosen = amid_nans(torch.randn(rows, width).half()), choose(rows, experts, top_k)
    weights = torch.rand(rows, top_k).softmax(1)
    out = empty_out(rows, width)
    run_experts(
        out, x, chosen, weights, *matrices, activation, 1.702, 1.5,
        gate_up_bias=biases[0], down_bias=biases[1],
    )  # fmt: skip
    assert_written(out)

    def run(expert: int, some: torch.Tensor) -> torch.Tensor:
        gate_up = some @ gate_ups[expert].t() + (0 if biases[0] is None else biases[0][expert])
        gated = {
            "silu": products.silu_mul,
            "gelu": products.gelu_mul,
            "gelu_tanh": products.gelu_tanh_mul,
            "clamped_swiglu": lambda both: products.clamped_swiglu_mul(both, 1.702, 1.5),
        }[activation](gate_up)
        return gated @ downs[expert].t() + (0 if biases[1] is None else biases[1][expert])

    expected = experts_reference(x.float(), chosen.long(), weights, run)
    # Gate, up and what becomes of them are rounded to float16: some of its eps in each, and as many as inner add up.
    size = expected.abs().max() if rows else torch.tensor(0.0)
    assert ((out - expected).abs() <= 4 * torch.finfo(torch.float16).eps * (1 + size)).all()


def test_a_row_of_a_mixture_does_not_depend_on_the_others() -> None:
    gate_up, down = torch.randn(4, 32, 24).half(), torch.randn(4, 24, 16).half()
    x, chosen, weights = torch.randn(5, 24).half(), choose(5, 4, 2), torch.rand(5, 2)
    whole, alone = torch.empty(5, 24), torch.empty(1, 24)
    run_experts(whole, x, chosen, weights, gate_up, down, "silu")
    for row in range(5):
        run_experts(alone, x[row:][:1], chosen[row:][:1], weights[row:][:1], gate_up, down, "silu")
        assert torch.equal(alone[0], whole[row])
