"""Norms of queries and keys, rotary embedding and the KV write, in one Triton kernel.

What rms_norm (Zhang & Sennrich 2019, arXiv:1910.07467), apply_rope (Su et al. 2021, arXiv:2104.09864) and kv_write do
one after the other. A row's result is its own alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from appliance.kernels.kv_layout import codes_and_scales

# Heads of one program.
_TILE = 4


@triton.jit
def _factor_of_all(x, count, eps, TILE: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of `count` numbers."""
    squares = tl.zeros((TILE,), tl.float32)
    for at in range(0, count, TILE):
        column = at + tl.arange(0, TILE)
        values = tl.load(x + column, mask=column < count, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / count + eps)


@triton.jit
def _codes(x):
    """Rows of numbers as int8 codes and scales, the largest of a row ±127; not a number makes the scale none."""
    largest = tl.max(tl.abs(x), 1)
    flaw = tl.sum(x * 0.0, 1)
    # Smaller ones have no reciprocal.
    sound = (flaw == 0.0) & (largest > 1e-35)
    factor = 127.0 / tl.where(sound, largest, 1.0)
    # Rounds to the nearest whole number, halves to even: beyond 2 ** 23 there are no others.
    whole = (x * factor[:, None] + 12582912.0) - 12582912.0
    return tl.where(sound[:, None], whole, 0.0).to(tl.int8), largest / 127.0 + flaw


@triton.jit
def finish_qkv_kernel(
    q,
    qkv,
    pool,
    scales,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    blocks,
    offsets,
    qkv_stride,
    eps,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of heads), query, key and value heads being counted one after the other."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    d = tl.arange(0, WIDTH)
    held = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    source = qkv + row * qkv_stride
    of_head = (source + head * HEAD_DIM)[:, None]
    x = tl.load(of_head + d[None, :], mask=held, other=0.0).to(tl.float32)
    # Element d is turned with this one.
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    if HALF:
        y = tl.load(of_head + other[None, :], mask=held, other=0.0).to(tl.float32)
    if NORM is not None:
        if NORM == "heads":
            factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_DIM + eps)
            of_q, of_k = (head * 0)[:, None], (head * 0)[:, None]
        else:
            of_queries = _factor_of_all(source, HEADS * HEAD_DIM, eps, 1024)
            of_keys = _factor_of_all(source + HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, eps, 1024)
            factor = tl.where(is_q, of_queries, of_keys)
            of_q, of_k = (head * HEAD_DIM)[:, None], ((head - HEADS) * HEAD_DIM)[:, None]
        factor = tl.where(is_q | is_k, factor, 1.0)[:, None]
        weight = tl.load(q_weight + of_q + d[None, :], mask=held & is_q[:, None], other=1.0)
        x *= factor * tl.load(k_weight + of_k + d[None, :], mask=held & is_k[:, None], other=1.0) * weight
        if HALF:
            weight = tl.load(q_weight + of_q + other[None, :], mask=held & is_q[:, None], other=1.0)
            weight *= tl.load(k_weight + of_k + other[None, :], mask=held & is_k[:, None], other=1.0)
            y *= factor * weight
    if HALF:
        angle = tl.load(positions + row).to(tl.int64) * HALF + d % HALF
        c = tl.load(cos + angle, mask=d < 2 * HALF, other=1.0)
        s = tl.load(sin + angle, mask=d < 2 * HALF, other=0.0)
        turned = x * c[None, :] + y * tl.where(d < HALF, -s, s)[None, :]
        x = tl.where((is_q | is_k)[:, None], turned, x)
    at = q + (row * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(at, x.to(q.dtype.element_ty), mask=held & is_q[:, None])
    block, offset = tl.load(blocks + row).to(tl.int64), tl.load(offsets + row)
    written = held & (~is_q & (block >= 0))[:, None]
    # Planes of keys and of values follow each other, as the heads do here.
    plane = block * BLOCK_STRIDE + (head - HEADS) * PLANE
    at = pool + (plane + offset * HEAD_DIM)[:, None] + d[None, :]
    if scales is None:
        tl.store(at, x.to(pool.dtype.element_ty), mask=written)
    else:
        codes, scale = _codes(tl.where(held, x, 0.0))
        tl.store(at, codes, mask=written)
        is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & (block >= 0)
        tl.store(scales + plane // 4 + offset, scale, mask=is_kv)


@dataclass(frozen=True, slots=True)
class QKNorm:
    """Norms of queries and keys: of each head, weights float32 [head_dim], or where `whole`, of all heads of a row
    together, weights [heads · head_dim]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    whole: bool


def finish_qkv(
    q: torch.Tensor,
    qkv: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    norm: QKNorm | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Norm and rotate queries and keys; store keys and values, rounded once.

    Args:
        q: [rows, heads, head_dim], contiguous: what becomes of the queries.
        qkv: [rows, (heads + 2 · kv_heads) · head_dim], fp16, bf16 or fp32, may be strided along the rows.
        pool: as `kernels.kv_layout` has it, in any of these types or int8; a head of a token is quantised so that its
            largest element is ±127.
        layer: index of the layer in the pool.
        positions, blocks, offsets: int32 [rows]: a row's position in its sequence, the block of its keys and values
            and their place inside it. A row whose block is below 0 writes none.
        rope: cosines and sines, float32 [positions, rotary_dim / 2].
    """
    rows, heads, head_dim = q.shape
    codes, scales = codes_and_scales(pool, head_dim) if pool.dtype is torch.int8 else (pool, None)
    kv_heads = codes.shape[3]
    assert q.is_contiguous()
    assert qkv.shape == (rows, (heads + 2 * kv_heads) * head_dim)
    assert qkv.stride(1) == 1
    cos, sin = rope if rope is not None else (None, None)
    finish_qkv_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, _TILE))](
        q,
        qkv,
        codes[:, layer],
        None if scales is None else scales[:, layer],
        norm.q_weight if norm else None,
        norm.k_weight if norm else None,
        cos,
        sin,
        positions,
        blocks,
        offsets,
        qkv.stride(0),
        norm.eps if norm else 0.0,
        NORM=None if norm is None else "whole" if norm.whole else "heads",
        HALF=0 if cos is None else cos.shape[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_STRIDE=codes.stride(0),
        PLANE=codes.stride(2) // kv_heads,
        TILE=_TILE,
        num_warps=4,
    )
