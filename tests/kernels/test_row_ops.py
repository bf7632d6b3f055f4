"""Norm, activation and rotary embedding: against transformers' modules, and row by row the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from appliance.kernels.gated_product import gelu_mul, gelu_tanh_mul, silu_mul
from appliance.kernels.rms_norm import rms_norm
from appliance.kernels.rope import apply_rope, rope_table

EPS32 = torch.finfo(torch.float32).eps


def test_rms_norm_agrees_with_transformers() -> None:
    norm = LlamaRMSNorm(100, eps=1e-5)
    norm.weight.data.normal_()
    x = torch.randn(7, 100) * 30
    expected = norm(x).detach()
    assert torch.allclose(
        rms_norm(x, norm.weight.data, 1e-5), expected, atol=4 * EPS32 * float(expected.abs().max())
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_silu_mul_takes_the_gate_from_the_first_half() -> None:
    gate, up = torch.randn(5, 33), torch.randn(5, 33)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    assert (silu_mul(torch.cat([gate, up], dim=1)) - expected).abs().max() < 8 * EPS32 * expected.abs().max()


@pytest.mark.parametrize(("op", "name"), [(gelu_mul, "none"), (gelu_tanh_mul, "tanh")])
def test_gelu_mul_agrees_with_torch(op: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    gate, up = 3 * torch.randn(5, 33), torch.randn(5, 33)
    expected = torch.nn.functional.gelu(gate.double(), approximate=name) * up.double()
    assert (op(torch.cat([gate, up], dim=1)) - expected).abs().max() < 8 * EPS32 * expected.abs().max()


@pytest.mark.parametrize("theta", [10_000.0, 100_000.0])
def test_rope_agrees_with_transformers(theta: float) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    positions = torch.tensor([0, 1, 2, 77, 4095])
    q, k = torch.randn(1, 2, 5, 32), torch.randn(1, 1, 5, 32)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    table_cos, table_sin = rope_table(4096, theta ** -(torch.arange(0, 32, 2) / 32), 1.0)
    for given, expected in ((q, expected_q), (k, expected_k)):
        rows = given[0].transpose(0, 1).contiguous()
        apply_rope(rows, table_cos[positions], table_sin[positions])
        # Angles of some thousands lose that many ulps before the cosine is taken.
        assert torch.allclose(rows, expected[0].transpose(0, 1), atol=4096 * EPS32)


@pytest.mark.parametrize("op", [silu_mul, gelu_mul, gelu_tanh_mul, torch.tanh])
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("width", [33, 1536, 8192, 14336])
def test_products_and_caps_do_not_depend_on_how_threads_share_them(
    op: Callable[[torch.Tensor], torch.Tensor], threads: int, width: int
) -> None:
    before = torch.get_num_threads()
    x = torch.randn(32, 2 * width)
    try:
        torch.set_num_threads(threads)
        together = op(x)
        alone = torch.cat([op(x[i : i + 1]) for i in range(32)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


def test_rope_leaves_what_is_beyond_the_rotary_dimensions() -> None:
    x = torch.randn(3, 2, 16)
    before = x.clone()
    cos, sin = rope_table(8, 10_000.0 ** -(torch.arange(0, 8, 2) / 8), 1.0)
    apply_rope(x, cos[5:8], sin[5:8])
    assert torch.equal(x[..., 8:], before[..., 8:])
    assert not torch.equal(x[..., :8], before[..., :8])


@pytest.mark.parametrize("width", [576, 1536, 33, 2880])
def test_rows_do_not_depend_on_their_number(width: int) -> None:
    x, weight = torch.randn(70, 2 * width), torch.randn(width)
    normed, gated = rms_norm(x[:, :width].contiguous(), weight, 1e-5), silu_mul(x)
    for rows in (1, 2, 3, 7, 16, 33, 69):
        part = x[:rows].clone()
        assert torch.equal(rms_norm(part[:, :width].contiguous(), weight, 1e-5), normed[:rows])
        assert torch.equal(silu_mul(part), gated[:rows])
