"""Gated products in Triton (GLU variants, Shazeer 2020, arXiv:2002.05202); the reference has the formulas."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from appliance.kernels.gated_product import ACTIVATIONS

_TILE = 1024


@triton.jit
def gated_product_kernel(
    out,
    gate_up,
    out_stride,
    gate_up_stride,
    width,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = column < width
    at = gate_up + row * gate_up_stride + column
    gate = tl.load(at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=held, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # z / 2 · (1 + tanh(y)) = z / (1 + exp(-2 y)), which infinities do no harm.
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        gate = gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out + row * out_stride + column, (gate * up).to(out.dtype.element_ty), mask=held)


def gated_product(
    out: torch.Tensor,
    gate_up: torch.Tensor,
    activation: str,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> None:
    """y = activation(gate) · up, computed in float32.

    Args:
        out: [rows, width], fp16, bf16 or fp32.
        gate_up: [rows, 2 · width], the gate in the first half of each row; both may be strided along the rows.
        activation: of ACTIVATIONS; "gelu" is with the error function, and "clamped_swiglu" bounds gate and up by
            `limit` and adds 1 to up.
        alpha, limit: of "clamped_swiglu".
    """
    rows, width = out.shape
    assert activation in ACTIVATIONS
    assert gate_up.shape == (rows, 2 * width)
    assert out.stride(1) == gate_up.stride(1) == 1
    gated_product_kernel[(rows, triton.cdiv(width, _TILE))](
        out, gate_up, out.stride(0), gate_up.stride(0), width, alpha, limit,
        ACTIVATION=activation, TILE=_TILE, num_warps=4,
    )  # fmt: skip
