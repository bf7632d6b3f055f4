"""What decode and prefill have in common: a tile of query rows over one segment of a context."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
# Of int8 values: weights times scales would be lost among the smallest fp16 numbers.
_LIFT = tl.constexpr(64.0)


@triton.jit
def power_of_two(exponent):
    """2 to the power of whole numbers from -126 to 0, exactly; 0 below."""
    biased = tl.maximum(exponent, -127.0).to(tl.int32) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def finite(highest):
    """What to subtract from scores whose highest is this: -inf where there is none."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _scores(products, key_scales, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of queries and keys as logarithms to base 2 of unnormalised weights."""
    if key_scales is not None:
        products = products * key_scales[None, :]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), which infinities do no harm.
        doubled = products * (scale / softcap * 2.0 * _LOG2E)
        return (1.0 - 2.0 / (1.0 + tl.exp2(doubled))) * (softcap * _LOG2E)
    else:
        return products * (scale * _LOG2E)


@triton.jit
def attend_segment(
    q,
    keys,
    key_scales,
    table,
    positions,
    segment,
    first,
    last,
    window,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Rows [R, D] of queries over tokens first … last of a segment, of which a row at position p sees those up to p.

    Returns:
        Of each row, the highest score rounded up, the sum of the weights and the weighted sum of the values [R, D].
    """
    ROWS: tl.constexpr = q.shape[0]
    WIDTH: tl.constexpr = q.shape[1]
    d = tl.arange(0, WIDTH)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    # In each of 16 columns, so that it is a product, too.
    total = tl.zeros((ROWS, 16), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    ones = tl.full((TILE, 16), 1.0, q.dtype)
    start = tl.maximum(segment * SEGMENT, first // TILE * TILE)
    stop = tl.minimum((segment + 1) * SEGMENT, last + 1)
    for at in tl.range(start, stop, TILE, num_stages=STAGES):
        token = at + tl.arange(0, TILE)
        # Neither a hole nor what isn't written yet is read: nothing times what is there may not be a number.
        there = (token >= first) & (token <= last)
        block = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = block * BLOCK_STRIDE + token % BLOCK_SIZE * HEAD_DIM
        k = tl.load(
            keys + place[None, :] + d[:, None], mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0
        )
        v = tl.load(
            keys + VALUES + place[:, None] + d[None, :],
            mask=there[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        products = tl.dot(q, k.to(q.dtype))
        if key_scales is not None:
            scale_at = key_scales + block * (BLOCK_STRIDE // 4) + token % BLOCK_SIZE
            scores = _scores(products, tl.load(scale_at, mask=there, other=0.0), scale, softcap, SOFTCAP)
        else:
            scores = _scores(products, None, scale, softcap, SOFTCAP)
        visible = token[None, :] <= positions[:, None]
        if WINDOW:
            visible &= token[None, :] > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        raised = tl.maximum(highest, tl.ceil(tl.max(scores, 1)))
        weights = tl.exp2(scores - finite(raised)[:, None])
        fade = power_of_two(highest - finite(raised))[:, None]
        total = tl.dot(weights.to(q.dtype), ones, total * fade)
        if key_scales is not None:
            value_scales = tl.load(scale_at + VALUES // 4, mask=there, other=0.0)
            weights = weights * (value_scales * _LIFT)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade)
        highest = raised
    return highest, tl.max(total, 1), acc


@triton.jit
def start_state(sinks, heads, valid):
    """Highest score and sum of weights of rows that have seen nothing but their head's sink, if there are any."""
    if sinks is None:
        highest = tl.full(valid.shape, float("-inf"), tl.float32)
        total = tl.zeros(valid.shape, tl.float32)
    else:
        sink = tl.load(sinks + heads, mask=valid, other=0.0) * _LOG2E
        highest = tl.ceil(sink)
        total = tl.exp2(sink - highest)
    return highest, total


@triton.jit
def average(acc, total, LIFTED: tl.constexpr):
    """Weighted sums by sums of weights; zeros for a row that saw nothing."""
    if LIFTED:
        total = total * _LIFT
    return tl.where(total == 0.0, 0.0, acc / tl.where(total == 0.0, 1.0, total))


@triton.jit
def tile_rows(ROWS: tl.constexpr, GROUP: tl.constexpr, first_token, stop_token):
    """Token and query head (of those that share a KV head) of each row of a tile, and whether there is such a one."""
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    return token, row % GROUP, (row < ROWS // GROUP * GROUP) & (token < stop_token)
