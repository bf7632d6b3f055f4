"""Mixture of experts in Triton: choosing, sorting, products, adding up; nothing waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.linear.gpu_grouped import ExpertMatrices, multiply_grouped

_TILE = 1024


@triton.jit
def route_kernel(
    chosen,
    weights,
    logits,
    logits_stride,
    experts,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    x = tl.load(logits + row * logits_stride + expert, mask=expert < experts, other=float("-inf"))
    left = x.to(tl.float32)
    highest = tl.max(left, 0)
    likelihoods = tl.exp(left - highest)
    found = tl.zeros((SLOTS,), tl.int32)
    parts = tl.zeros((SLOTS,), tl.float32)
    for k in tl.static_range(TOP_K):
        most, index = tl.max(left, 0, return_indices=True)
        found = tl.where(slot == k, index, found)
        parts = tl.where(slot == k, tl.exp(most - highest), parts)
        left = tl.where(expert == index, float("-inf"), left)
    total = tl.sum(parts, 0) if NORMALISED else tl.sum(likelihoods, 0)
    # Where logits are not numbers, experts are still some that there are.
    tl.store(chosen + row * TOP_K + slot, tl.minimum(found, experts - 1), mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, parts / total, mask=slot < TOP_K)


def route(chosen: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, normalised: bool) -> None:
    """The most likely experts of each row, by p = softmax(logits).

    Args:
        chosen: int32 [rows, top_k], contiguous: the experts, the most likely first, of equal ones the first.
        weights: float32 [rows, top_k], contiguous: p / Σ p over the chosen where `normalised`, else p.
        logits: [rows, experts], fp16, bf16 or fp32, may be strided along the rows.
    """
    rows, experts = logits.shape
    top_k = chosen.shape[1]
    assert chosen.shape == weights.shape == (rows, top_k)
    assert chosen.is_contiguous()
    assert weights.is_contiguous()
    assert logits.stride(1) == 1
    route_kernel[(rows,)](
        chosen,
        weights,
        logits,
        logits.stride(0),
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        NORMALISED=normalised,
        num_warps=1,
    )


@triton.jit
def combine_kernel(
    out, parts, weights, out_stride, parts_stride, width, TOP_K: tl.constexpr, TILE: tl.constexpr
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = column < width
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(TOP_K):
        choice = row * TOP_K + k
        part = tl.load(parts + choice * parts_stride + column, mask=held, other=0.0).to(tl.float32)
        total += part * tl.load(weights + choice)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=held)


def combine(out: torch.Tensor, parts: torch.Tensor, weights: torch.Tensor) -> None:
    """y[row] = Σ weights[row, k] · parts[row · top_k + k] over k in order, in float32.

    Args:
        out: [rows, width], fp16, bf16 or fp32.
        parts: [rows · top_k, width], likewise: what the chosen experts made of the rows, choices counted row by row;
            both may be strided along the rows.
        weights: float32 [rows, top_k], contiguous.
    """
    rows, width = out.shape
    top_k = weights.shape[1]
    assert parts.shape == (rows * top_k, width)
    assert weights.is_contiguous()
    assert out.stride(1) == parts.stride(1) == 1
    combine_kernel[(rows, triton.cdiv(width, _TILE))](
        out, parts, weights, out.stride(0), parts.stride(0), width, TOP_K=top_k, TILE=_TILE, num_warps=4
    )


def sort_by_expert(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The choices of a batch in the order of their experts, and of the rows where experts are the same.

    Sorting is torch's: the sizes are small, and the grid of what follows depends on shapes alone.

    Args:
        chosen: int32 [rows, top_k].

    Returns:
        int64 [rows · top_k], choices counted row by row, those of the first expert first; and int32 [experts + 1], the
        place there where each expert's begin, and the end.
    """
    ordered, order = torch.sort(chosen.flatten(), stable=True)
    bounds = torch.arange(experts + 1, dtype=chosen.dtype, device=chosen.device)
    return order, torch.searchsorted(ordered, bounds, out_int32=True)


def run_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices | torch.Tensor,
    down: ExpertMatrices | torch.Tensor,
    activation: str,
    alpha: float = 1.0,
    limit: float = 0.0,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """y[row] = Σ weights[row, k] · down(activation(gate) · up) of expert chosen[row, k], over k in order.

    Args:
        out: [rows, width], fp16, bf16 or fp32.
        x: fp16 or bf16 [rows, width]; both may be strided along the rows.
        chosen, weights: of `route`.
        gate_up, down: matrices [2 · inner, width], the gate's rows first, and [width, inner] of each expert.
        activation, alpha, limit: of `gated_product`.
        gate_up_bias, down_bias: float32 [experts, 2 · inner] and [experts, width], contiguous.
    """
    top_k = chosen.shape[1]
    experts, doubled = (
        gate_up.shape[:2] if isinstance(gate_up, torch.Tensor) else (gate_up.experts, gate_up.rows)
    )
    order, offsets = sort_by_expert(chosen, experts)
    gate_and_up = x.new_empty(len(order), doubled)
    multiply_grouped(gate_up, x, order, offsets, out=gate_and_up, top_k=top_k, bias=gate_up_bias)
    inner = x.new_empty(len(order), doubled // 2)
    gated_product(inner, gate_and_up, activation, alpha, limit)
    parts = x.new_empty(len(order), out.shape[1], dtype=torch.float32)
    multiply_grouped(down, inner, order, offsets, out=parts, bias=down_bias)
    combine(out, parts, weights)
