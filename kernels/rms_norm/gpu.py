"""RMSNorm in Triton (Zhang & Sennrich 2019, arXiv:1910.07467): a row is one program, whatever stands beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(out, x, weight, out_stride, x_stride, width, eps, WIDTH: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    held = column < width
    values = tl.load(x + row * x_stride + column, mask=held, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / width + eps)
    normed = values * factor * tl.load(weight + column, mask=held, other=0.0)
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=held)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """y = x / sqrt(mean(x²) + eps) · weight, computed in float32.

    Args:
        out: [rows, width], fp16, bf16 or fp32; may be `x`.
        x: [rows, width], likewise; both may be strided along the rows.
        weight: float32 [width].
        eps: added to the mean square.
    """
    rows, width = x.shape
    assert out.shape == x.shape
    assert x.stride(1) == out.stride(1) == weight.stride(0) == 1
    padded = triton.next_power_of_2(width)
    warps = min(max(padded // 512, 1), 16)
    rms_norm_kernel[(rows,)](
        out, x, weight, out.stride(0), x.stride(0), width, eps, WIDTH=padded, num_warps=warps
    )
