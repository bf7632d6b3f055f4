"""SiLU-gated product in plain torch (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

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
