"""Rows of embeddings in Triton, interpreted, against the canonical form's own values."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_weights import GPU_SCHEMES, random_gpu_weight

from appliance.kernels.embedding.gpu import embed
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.quant.gpu_packed import pack_for_gpu
from appliance.quant.tensor import QuantTensor

TOKENS = torch.tensor([69, 0, 64])


def assert_rows(weight: QuantTensor | torch.Tensor, factor: float) -> None:
    """Bit for bit, in every type, and nothing around them is written."""
    table: GpuMatrix | torch.Tensor | None = (
        weight if isinstance(weight, torch.Tensor) else pack_for_gpu(weight)
    )
    assert table is not None
    values = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
    expected = values[TOKENS] * factor
    for tokens, dtype in ((TOKENS, torch.float32), (TOKENS.int(), torch.float16), (TOKENS, torch.bfloat16)):
        whole = torch.full((len(tokens) + 2, values.shape[1] + 3), float("nan"), dtype=dtype)
        out = whole[1:-1, :-3]
        embed(out, tokens, table, factor)
        if dtype is torch.bfloat16:
            # The interpreter cuts it where the device rounds it.
            assert ((out.float() - expected).abs() <= torch.finfo(dtype).eps * expected.abs()).all()
        else:
            assert torch.equal(out, expected.to(dtype))
        assert whole.isnan().sum() == whole.numel() - out.numel()


@pytest.mark.parametrize("name", GPU_SCHEMES)
def test_rows_are_bit_for_bit_what_they_are_dequantised_to(name: str) -> None:
    torch.manual_seed(0)
    assert_rows(random_gpu_weight(name, 70, 520, 16), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [48, 256, 600])
@pytest.mark.parametrize("name", ["zp4", "affine4", "sym8"])
def test_any_group_and_scales(name: str, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_rows(random_gpu_weight(name, 70, 600, group_size, dtype), 33.5)


def test_permuted_columns() -> None:
    torch.manual_seed(0)
    weight = random_gpu_weight("zp4", 70, 200, 48)
    assert_rows(dataclasses.replace(weight, permutation=torch.randperm(200)), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dense_rows_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_rows(torch.randn(70, 520).to(dtype), 33.5)


def test_no_rows() -> None:
    embed(torch.empty(0, 8), TOKENS[:0], torch.randn(70, 8), 1.0)
