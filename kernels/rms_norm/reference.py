"""RMSNorm in plain torch (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight, computed in float32.

    Args:
        x: [rows, width].
        weight: [width], float32.
        eps: added to the mean square.

    Returns:
        [rows, width] in the dtype of `x`.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
