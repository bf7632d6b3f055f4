"""Gated products in plain torch (GLU variants, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import math

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) · up with silu(z) = z / (1 + exp(-z)).

    Args:
        gate_up: [rows, 2 · width], the gate in the first half of each row.

    Returns:
        [rows, width].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    # Written out: torch's silu computes what is left over at the end of a thread's share by another exp.
    return gate / (1 + torch.exp(-gate)) * up


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_mul`, with gelu(z) = z / 2 · (1 + erf(z / √2)) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5))) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `gelu_mul`, with the approximation z / 2 · (1 + tanh(√(2 / π) · (z + 0.044715 · z³)))."""
    gate, up = gate_up.chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def clamped_swiglu_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """y = g / (1 + exp(-alpha · g)) · (u + 1), with g = min(gate, limit) and u = up between -limit and limit (gpt-oss).

    Args and returns as `silu_mul`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(gate * -alpha)) * (up + 1)
