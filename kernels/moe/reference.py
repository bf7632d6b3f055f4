"""Mixture of experts in plain torch (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def route(logits: torch.Tensor, top_k: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` most likely experts of each row, by p = softmax(logits).

    Args:
        logits: [rows, experts], float32.
        normalised: the weights are p / Σ p over the chosen, which is the softmax of theirs alone; else p.

    Returns:
        The experts, int64 [rows, top_k], the most likely first, and their weights, float32.
    """
    highest, chosen = torch.topk(logits, top_k, dim=-1)
    over = highest if normalised else logits
    # Written out, so that what a row holds alone decides the order of its sums.
    total = torch.exp(over - highest[:, :1]).sum(dim=-1, keepdim=True)
    return chosen, torch.exp(highest - highest[:, :1]) / total


def run_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    run: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """y[row] = Σ weights[row, k] · run(chosen[row, k], x[row]) over k, experts in ascending order.

    Where `run` gives a row the same whatever rows stand beside it, so does this.

    Args:
        x: [rows, width], float32.
        chosen: [rows, top_k] int64, no expert twice in a row.
        weights: [rows, top_k], float32.
        run: (expert, [some rows, width]) → [some rows, out]; called for experts that some row chose.

    Returns:
        [rows, out], float32.
    """
    y: torch.Tensor | None = None
    for expert in sorted(set(chosen.flatten().tolist())):
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        part = run(expert, x[rows]).mul_(weights[rows, place].unsqueeze(-1))
        if y is None:
            y = part.new_zeros(len(x), part.shape[1])
        y.index_add_(0, rows, part)
    return x.new_empty(0, x.shape[1]) if y is None else y
