"""A dense product in plain torch whose rows do not depend on how many rows are computed together.

BLAS libraries choose another kernel, and so another order of summation, for another number of rows. What stays fixed
is the result of a row at a fixed number of rows, wherever it stands and whatever its neighbours are. So rows are
computed in tiles of a few sizes that `row_tiles` has found to agree bit for bit on this machine.
"""

from __future__ import annotations

from collections import defaultdict

import torch

_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)


def linear(
    x: torch.Tensor, weight_t: torch.Tensor, bias: torch.Tensor | None, tiles: tuple[int, ...]
) -> torch.Tensor:
    """y = x · weight_t + bias, each row the same whatever the number of rows.

    Args:
        x: [rows, in], float32; rows may be 0.
        weight_t: [in, out], float32, contiguous.
        bias: [out] or None.
        tiles: `row_tiles(in, out)`.

    Returns:
        [rows, out], float32.
    """
    rows = x.shape[0]
    out = x.new_empty(rows, weight_t.shape[1])
    start = 0
    while rows - start >= tiles[-1]:
        stop = start + tiles[-1]
        torch.mm(x[start:stop], weight_t, out=out[start:stop])
        start = stop
    if start < rows:
        rest = rows - start
        size = next(tile for tile in tiles if tile >= rest)
        padded = x[start:] if size == rest else torch.cat([x[start:], x.new_zeros(size - rest, x.shape[1])])
        out[start:] = torch.mm(padded, weight_t)[:rest]
    return out if bias is None else out.add_(bias)


_agreeing_tiles: dict[tuple[int, int, int], tuple[int, ...]] = {}


def row_tiles(in_features: int, out_features: int) -> tuple[int, ...]:
    """Ascending tile sizes that agree bit for bit on this machine for weights of a shape, found by trying them.

    Of the candidate sizes, the largest set whose members give one and the same result, in every row of the tile.
    Tried once for each shape and number of threads.
    """
    key = (in_features, out_features, torch.get_num_threads())
    if key not in _agreeing_tiles:
        _agreeing_tiles[key] = _try_tiles(in_features, out_features)
    return _agreeing_tiles[key]


def _try_tiles(in_features: int, out_features: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    # Never the model's own weights, which may be zeros. Overlapping windows of one random vector are cheap to make.
    windows = torch.randn(in_features + out_features, generator=generator).unfold(0, out_features, 1)
    weight_t = windows[:in_features].contiguous()
    row = torch.randn(1, in_features, generator=generator)
    agreeing: dict[bytes, list[int]] = defaultdict(list)
    for size in _CANDIDATES:
        result = torch.mm(row.expand(size, -1).contiguous(), weight_t)
        if bool((result == result[0]).all()):
            agreeing[result[0].numpy().tobytes()].append(size)
    _, sizes = max((len(sizes), sizes) for sizes in agreeing.values())
    return tuple(sizes)
