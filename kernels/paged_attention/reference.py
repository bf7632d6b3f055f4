"""Paged attention in plain torch: prefill and decode alike, exact whatever the chunking or the batch.

A row's result depends only on its own keys and values: queries are computed in tiles of `QUERY_TILE` rows of one
sequence, keys in tiles between fixed token boundaries, and tiles are merged in order by online softmax (Milakov &
Gimelshein 2018, arXiv:1805.02867). A tile that is masked out for a row changes nothing in it.
"""

from __future__ import annotations

import torch

QUERY_TILE = 8
# Tiles of keys double in width: short contexts cost little, long ones take few tiles.
_FIRST_KV_TILE = 64
_WIDEST_KV_TILE = 512


def kv_tiles(context: int) -> list[tuple[int, int]]:
    """The tiles [start, stop) of keys that cover `context` tokens; where they lie depends on nothing else.

    Every boundary is a multiple of 64, and so of every block size up to that.
    """
    tiles = [(0, _FIRST_KV_TILE)]
    while tiles[-1][1] < context:
        start = tiles[-1][1]
        tiles.append((start, start + min(start, _WIDEST_KV_TILE)))
    return tiles


def kv_write(
    pool: torch.Tensor,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Store the keys and values of new tokens.

    Args:
        pool: [block, layer, 2, kv_heads, block_size, head_dim]; written in place.
        layer: index of the layer in the pool.
        keys, values: [tokens, kv_heads, head_dim].
        blocks, offsets: [tokens] int64, the block of each token and its place inside the block.
    """
    pool[blocks, layer, 0, :, offsets] = keys.to(pool.dtype)
    pool[blocks, layer, 1, :, offsets] = values.to(pool.dtype)


def paged_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    query_rows: torch.Tensor,
    query_positions: torch.Tensor,
    tables: torch.Tensor,
    active: tuple[int, ...],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each query with the tokens of its own sequence up to its own position.

    Args:
        q: [rows, heads, head_dim], float32.
        pool: [block, layer, 2, kv_heads, block_size, head_dim]; `layer` is the index in it.
        query_rows: [items, QUERY_TILE] int64, rows of `q`; a tile that is not full repeats its last row.
        query_positions: [items, QUERY_TILE] int64.
        tables: [items, blocks] int64; covers whole KV tiles, padded with blocks of the same sequence.
        active: for each of the `kv_tiles`, how many leading items reach into it (longest contexts come first).
        scale: multiplies the scores.
        window: a query sees the token at its own position and window - 1 before it; 0: all.
        softcap: c of c · tanh(score / c), which bounds the scores; 0: none.
        sinks: [heads], float32, or None: of each head a score for attending to nothing, which takes part in the softmax
            (Xiao et al. 2023, arXiv:2309.17453, with a learned one for the first token's).

    Returns:
        [rows, heads, head_dim], float32.
    """
    items, tile = query_rows.shape
    heads, head_dim = q.shape[1:]
    num_layers, _, kv_heads, block_size = pool.shape[1:5]
    group = heads // kv_heads
    lanes = tile * group
    queries = (q * scale)[query_rows].view(items, tile, kv_heads, group, head_dim)
    queries = queries.transpose(1, 2).reshape(items * kv_heads, lanes, head_dim)
    positions = (
        query_positions.repeat_interleave(group, dim=1).repeat_interleave(kv_heads, dim=0).unsqueeze(-1)
    )
    # Each (block, layer, k or v, kv head) is one contiguous row of the pool.
    rows = pool.view(-1, block_size * head_dim)
    first = (tables.unsqueeze(1) * num_layers + layer) * 2 * kv_heads + torch.arange(kv_heads).view(1, -1, 1)
    floor = torch.finfo(torch.float32).min
    highest = q.new_full((items * kv_heads, lanes, 1), floor)
    total = torch.zeros_like(highest)
    if sinks is not None:
        # As if a tile with nothing but the sink had come first.
        of_lanes = sinks.view(kv_heads, 1, group).expand(-1, tile, -1).reshape(kv_heads, lanes)
        highest, total = of_lanes.repeat(items, 1).unsqueeze(-1), torch.ones_like(total)
    acc = torch.zeros_like(queries)
    for (start, stop), count in zip(kv_tiles(tables.shape[1] * block_size), active, strict=True):
        n = count * kv_heads
        place = first[:count, :, start // block_size : stop // block_size].flatten()
        keys = rows.index_select(0, place).view(n, stop - start, head_dim).float()
        values = rows.index_select(0, place + kv_heads).view(n, stop - start, head_dim).float()
        scores = torch.bmm(queries[:n], keys.transpose(1, 2))
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(start, stop)
        hidden = at > positions[:n]
        if window:
            hidden |= at <= positions[:n] - window
        # A finite floor instead of -inf: a row with nothing visible yet is wiped out exactly by the next tile.
        scores.masked_fill_(hidden, floor)
        new_highest = torch.maximum(highest[:n], scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(new_highest).exp_()
        fade = torch.exp(highest[:n] - new_highest)
        acc[:n].mul_(fade).add_(torch.bmm(weights, values))
        total[:n].mul_(fade).add_(weights.sum(dim=-1, keepdim=True))
        highest[:n] = new_highest
    result = (acc / total).view(items, kv_heads, tile, group, head_dim).transpose(1, 2)
    out = torch.empty_like(q)
    out[query_rows.flatten()] = result.reshape(items * tile, heads, head_dim)
    return out
