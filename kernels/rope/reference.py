"""Rotary position embedding in plain torch (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch


def rope_table(
    max_positions: int, frequencies: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of position · frequency, times a factor.

    Args:
        frequencies: [rotary_dim / 2], float32; without rescaling theta^(-2i / rotary_dim).

    Returns:
        Two float32 tensors [max_positions, rotary_dim / 2].
    """
    angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angle.cos() * factor, angle.sin() * factor


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first `rotary_dim` elements of each head in place; element i is paired with i + rotary_dim / 2.

    Args:
        x: [rows, heads, head_dim], float32.
        cos, sin: [rows, rotary_dim / 2], the table's rows at each row's position.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = first * cos - second * sin
    x[..., half : 2 * half] = second * cos + first * sin
    x[..., :half] = rotated
