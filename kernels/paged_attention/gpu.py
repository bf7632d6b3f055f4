"""Paged attention in Triton: decode and chunked prefill of a ragged batch, with one and the same result for a row.

A context is computed in segments between fixed token boundaries, and each segment in tiles of keys by online softmax
(Milakov & Gimelshein 2018, arXiv:1805.02867). Segments are added up in order: by decoding, whose segments are computed
side by side (Dao et al. 2023, "Flash-Decoding for long-context inference"), afterwards in a launch of its own; by
prefill as it goes. The query heads that share a KV head, of as many tokens as fit, are the rows of one tile.

What a row's result could depend on beside its own tokens is taken out of it. The highest score of a row is rounded up
to a whole power of two, so that rescaling is exact whenever it happens; weights are summed by the matrix unit, which
adds in one order however a tile is spread over threads; nothing is contracted to a fused multiply-add by the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from appliance.kernels.kv_layout import codes_and_scales
from appliance.kernels.paged_attention.gpu_tile import (
    attend_segment,
    average,
    finite,
    power_of_two,
    start_state,
    tile_rows,
)

# Tokens. A program of a decode step computes whole segments; more programs than splits would find nothing to do before
# a context is longer than SPLITS segments.
SEGMENT = 256
SPLITS = 32
# Segments that are merged in one turn of a loop.
AT_ONCE = 8
# What is kept of segments until they are merged; sequences that would need more are decoded some after the others.
SCRATCH_BYTES = 256 * 2**20

# Arguments that change from step to step, for whose values nothing is compiled anew.
_CHANGING = ("sequences", "blocks", "segments", "kept")


@triton.jit(do_not_specialize=_CHANGING)
def decode_kernel(
    q,
    pool,
    scales,
    tables,
    starts,
    contexts,
    sums,
    states,
    q_stride,
    blocks,
    segments,
    kept,
    window,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
):
    """Segments of one sequence and KV head: program (sequence, KV head, split). Sequences of many rows are left out.

    Of each segment: states [sequence, KV head, segment, 2, kept rows], the highest score and the sum of weights, and
    sums [sequence, KV head, segment, kept rows, WIDTH].
    """
    sequence, kv_head, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    if queries * GROUP > ROWS:
        return
    token, head, valid = tile_rows(ROWS, GROUP, 0, queries)
    d = tl.arange(0, WIDTH)
    at = (start + token).to(tl.int64) * q_stride + (kv_head * GROUP + head) * HEAD_DIM
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    positions = tl.where(valid, context - queries + token, -1)
    first = tl.maximum(context - queries - window + 1, 0) if WINDOW else 0
    keys = pool + kv_head * PLANE
    key_scales = None if scales is None else scales + kv_head * (PLANE // 4)
    row = tl.arange(0, ROWS)
    for segment in range(first // SEGMENT + tl.program_id(2), tl.cdiv(context, SEGMENT), tl.num_programs(2)):
        highest, total, acc = attend_segment(
            q_tile, keys, key_scales, tables + sequence * blocks, positions, segment, first, context - 1,
            window, scale, softcap, WINDOW, SOFTCAP, SEGMENT, TILE, STAGES, HEAD_DIM, BLOCK_SIZE,
            BLOCK_STRIDE, kv_heads * PLANE,
        )  # fmt: skip
        place = ((sequence * kv_heads + kv_head).to(tl.int64) * segments + segment) * kept
        tl.store(states + place * 2 + row, highest, mask=valid)
        tl.store(states + place * 2 + kept + row, total, mask=valid)
        tl.store(sums + place * WIDTH + row[:, None] * WIDTH + d[None, :], acc, mask=valid[:, None])


@triton.jit(do_not_specialize=_CHANGING)
def merge_kernel(
    out,
    sums,
    states,
    starts,
    contexts,
    sinks,
    out_stride,
    segments,
    kept,
    window,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LIFTED: tl.constexpr,
):
    """What `decode_kernel` left, in the order of the segments: program (sequence, token, head)."""
    sequence, token = tl.program_id(0), tl.program_id(1)
    head = tl.program_id(2) + tl.arange(0, 1)
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    if (queries * GROUP > ROWS) | (token >= queries):
        return
    position = tl.load(contexts + sequence) - queries + token
    first = tl.maximum(position - window + 1, 0) // SEGMENT if WINDOW else 0
    stop = tl.cdiv(position + 1, SEGMENT)
    begin = (sequence * (tl.num_programs(2) // GROUP) + head // GROUP).to(tl.int64) * segments
    row = token * GROUP + head % GROUP
    d = tl.arange(0, WIDTH)
    sink, total = start_state(sinks, head, head >= 0)
    highest = sink
    lane = tl.arange(0, 32)
    for at in range(first, stop, 32):
        place = (begin + at + lane) * (2 * kept) + row
        found = tl.load(states + place, mask=at + lane < stop, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(found, 0))
    highest = finite(highest)
    total = total * power_of_two(sink - highest)
    acc = tl.zeros((WIDTH,), tl.float32)
    for at in range(first, stop, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            inside = (at + i < stop) & (head >= 0)
            place = (begin + at + i) * kept
            factor = tl.load(states + place * 2 + row, mask=inside, other=float("-inf")) - highest
            factor = power_of_two(factor)
            total += tl.load(states + place * 2 + kept + row, mask=inside, other=0.0) * factor
            acc += tl.load(sums + (place + row) * WIDTH + d, mask=inside & (d >= 0), other=0.0) * factor
    at = (start + token).to(tl.int64) * out_stride + head * HEAD_DIM
    tl.store(out + at + d, average(acc, total, LIFTED), mask=d < HEAD_DIM)


@triton.jit(do_not_specialize=_CHANGING)
def prefill_kernel(
    out,
    q,
    pool,
    scales,
    tables,
    starts,
    contexts,
    sinks,
    out_stride,
    q_stride,
    sequences,
    blocks,
    window,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PLANE: tl.constexpr,
):
    """A tile of tokens of one sequence that `decode_kernel` left out: program (tile, KV head)."""
    TOKENS: tl.constexpr = ROWS // GROUP
    # The last tiles see most and go first. Sequence s has tiles from starts[s] // TOKENS + s on, and perhaps one more
    # than it needs.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    sequence, beyond = 0, sequences
    while sequence + 1 < beyond:
        middle = (sequence + beyond) // 2
        reached = tl.load(starts + middle) // TOKENS + middle <= tile
        sequence = tl.where(reached, middle, sequence)
        beyond = tl.where(reached, beyond, middle)
    start = tl.load(starts + sequence)
    queries = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    first_token = (tile - start // TOKENS - sequence) * TOKENS
    if (queries * GROUP <= DECODE_ROWS) | (first_token >= queries):
        return
    token, head, valid = tile_rows(ROWS, GROUP, first_token, queries)
    d = tl.arange(0, WIDTH)
    held = valid[:, None] & (d < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + head
    row = (start + token).to(tl.int64)
    q_tile = tl.load(q + (row * q_stride + heads * HEAD_DIM)[:, None] + d[None, :], mask=held, other=0.0)
    positions = tl.where(valid, context - queries + token, -1)
    position = context - queries + first_token
    first = tl.maximum(position - window + 1, 0) if WINDOW else 0
    last = tl.minimum(position + TOKENS, context) - 1
    keys = pool + kv_head * PLANE
    key_scales = None if scales is None else scales + kv_head * (PLANE // 4)
    highest, total = start_state(sinks, heads, valid)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for segment in range(first // SEGMENT, last // SEGMENT + 1):
        part_highest, part_total, part = attend_segment(
            q_tile, keys, key_scales, tables + sequence * blocks, positions, segment, first, last,
            window, scale, softcap, WINDOW, SOFTCAP, SEGMENT, TILE, STAGES, HEAD_DIM, BLOCK_SIZE,
            BLOCK_STRIDE, kv_heads * PLANE,
        )  # fmt: skip
        raised = tl.maximum(highest, part_highest)
        fade = power_of_two(highest - finite(raised))
        factor = power_of_two(part_highest - finite(raised))
        total = total * fade + part_total * factor
        acc = acc * fade[:, None] + part * factor[:, None]
        highest = raised
    at = row * out_stride + heads * HEAD_DIM
    tl.store(out + at[:, None] + d[None, :], average(acc, total[:, None], scales is not None), mask=held)


def decode_options(head_dim: int, group: int) -> dict[str, Any]:
    """How `decode_kernel` is compiled: without spilling registers, on any GPU."""
    wide = head_dim > 128
    return {
        "ROWS": max(16, triton.next_power_of_2(group)),
        "TILE": 32 if wide else 64,
        "STAGES": 3 if wide else 2,
        "num_warps": 8 if wide else 4,
        # Of small tiles, the assembler would spill some registers to fit one more program beside the others.
        "maxnreg": 168 if head_dim <= 64 else None,
        # The same bits, whatever else is compiled with it.
        "enable_fp_fusion": False,
    }


def prefill_options(head_dim: int, group: int, quantised: bool) -> dict[str, Any]:
    """As `decode_options`, for `prefill_kernel`."""
    decode = decode_options(head_dim, group)
    return decode | {
        # Hopper multiplies 64 rows by another instruction, and might add in another order.
        "ROWS": max(32, decode["ROWS"]),
        "DECODE_ROWS": decode["ROWS"],
        "STAGES": 2,
        "num_warps": 4 if head_dim <= 64 or (head_dim <= 128 and not quantised) else 8,
        "maxnreg": 255 if head_dim <= 64 else None,
    }


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    queries: Sequence[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of the queries of a ragged batch, each with its own sequence up to its own position.

    A row's result depends on its own queries, keys and values alone. Nothing waits for the device, and the grids
    depend on shapes and `queries` alone, so that a graph may be recorded.

    Args:
        out: [rows, heads, head_dim] in the dtype of `q`; rows of no sequence are left as they are.
        q: [rows, heads, head_dim], fp16 or bf16; both may be strided along the rows.
        pool: as `kernels.kv_layout` has it, in the dtype of `q` or int8; keys of all queries are in it.
        layer: index of the layer in the pool.
        tables: int32 [sequences, blocks]; the block of each block_size tokens. Entries that no query sees may hold
            anything.
        starts: int32 [sequences + 1], ascending: rows starts[s] … starts[s + 1] - 1 are the last tokens of sequence s.
        contexts: int32 [sequences], the number of tokens of each, its queries included. Where it is 0, so that a slot
            of a recorded batch stands empty, rows become zeros.
        queries: of each sequence the number of its rows, at least one with rows; of a recorded batch, those that it
            was recorded with.
        scale: multiplies the scores.
        window: a query sees the token at its own position and window - 1 before it; 0: all.
        softcap: c of c · tanh(score / c), which bounds the scores; 0: none.
        sinks: float32 [heads] or None, of each head a score for attending to nothing.
    """
    heads, head_dim = q.shape[1:]
    sequences, blocks = tables.shape
    codes, scales = codes_and_scales(pool, head_dim) if pool.dtype is torch.int8 else (pool, None)
    kv_heads, block_size = codes.shape[3:5]
    assert head_dim % 8 == 0
    assert q.stride()[1:] == out.stride()[1:] == (head_dim, 1)
    memory = (codes[:, layer], None if scales is None else scales[:, layer])
    group = heads // kv_heads
    width = triton.next_power_of_2(head_dim)
    segments = triton.cdiv(blocks * block_size, SEGMENT)
    decode = decode_options(head_dim, group)
    prefill = prefill_options(head_dim, group, scales is not None)
    rows = decode["ROWS"]
    most_decoded = max((count for count in queries if count * group <= rows), default=0)
    kept = most_decoded * group
    shape = {"GROUP": group, "SEGMENT": SEGMENT, "HEAD_DIM": head_dim, "WIDTH": width, "WINDOW": window > 0}
    attend = shape | {
        "SOFTCAP": softcap > 0,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": codes.stride(0),
        "PLANE": codes.stride(2) // kv_heads,
    }
    # Multiples of 4, so that numbers of each sequence start at multiples of 16 bytes, as kernels are compiled for.
    at_once = 4 * max(1, SCRATCH_BYTES // (16 * kv_heads * segments * max(1, kept) * width))
    for first in range(0, sequences if most_decoded else 0, at_once):
        some = tuple(each[first:] for each in (tables, starts, contexts))
        count = min(at_once, sequences - first)
        states = q.new_empty((count, kv_heads, segments, 2, kept), dtype=torch.float32)
        sums = q.new_empty((count, kv_heads, segments, kept, width), dtype=torch.float32)
        decode_kernel[(count, kv_heads, min(segments, SPLITS))](
            q, *memory, *some, sums, states, q.stride(0), blocks, segments, kept, window, scale,
            softcap, **attend, **decode,
        )  # fmt: skip
        merge_kernel[(count, most_decoded, heads)](
            out, sums, states, *some[1:], sinks, out.stride(0), segments, kept, window,
            ROWS=rows, AT_ONCE=AT_ONCE, LIFTED=scales is not None, num_warps=1, enable_fp_fusion=False, **shape,
        )  # fmt: skip
    if max(queries) * group > rows:
        tiles = len(q) // (prefill["ROWS"] // group) + sequences
        prefill_kernel[(tiles, kv_heads)](
            out, q, *memory, tables, starts, contexts, sinks, out.stride(0), q.stride(0), sequences, blocks, window,
            scale, softcap, **attend, **prefill,
        )  # fmt: skip
