"""AWQ layers into the canonical form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from appliance.kernels.repack import transpose_nibbles
from appliance.quant.awq.nibbles import (
    CHUNK_WORDS,
    in_parallel,
    pair_nibbles,
    transpose_squares,
    unpack_nibbles,
)
from appliance.quant.errors import CheckpointError
from appliance.quant.hf.module import Layout, Module
from appliance.quant.packing import packed_bytes
from appliance.quant.scheme import Mode, QuantScheme
from appliance.quant.tensor import QuantTensor

Fetch = Callable[[str], torch.Tensor]

# The column, of eight, that nibble i of gemm's words holds.
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# As Marlin's kernels want the scales of 64 outputs in groups, and of 32 where a row is one group: scale i is at i.
_GROUP_ORDER = [i + 8 * j for i in range(8) for j in range(8)]
_ROW_ORDER = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def read_gemm(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    """int32 [K, N/8]: words lie across the outputs, so their nibbles are transposed."""
    columns = module.shape[1]
    words = fetch("qweight")
    if columns % 8:
        words = torch.nn.functional.pad(words, (0, 0, 0, -columns % 8))
    codes = transpose_nibbles(words, _GEMM_ORDER)
    zeros = unpack_nibbles(fetch("qzeros"), _GEMM_ORDER).t()
    return _tensor(codes, fetch("scales").t(), module, layout, zeros)


def read_gemv(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    """int32 [N, K/8]: the canonical order; only scales and zero points are padded."""
    scales = _unpadded(fetch("scales"), module, layout)
    zeros = unpack_nibbles(fetch("qzeros"))[:, : scales.shape[1]]
    return _tensor(fetch("qweight"), scales, module, layout, zeros)


def read_gemv_fast(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    """int16 [N/4, K]: four rows take turns, 64 columns each; within 32 of them bytes and nibbles are shuffled.

    A word of such 32 columns, the b-th of four, has column 8a + 2b + c in nibble 4c + a.
    """
    rows, columns = module.shape
    words = fetch("qweight").view(torch.int32).view(rows // 4, columns // 64, 4, 2, 4)
    codes = words.new_empty(rows, columns // 32, 4)

    def turn(chunk: torch.Tensor, target: torch.Tensor) -> None:
        quads = chunk.permute(4, 0, 2, 1, 3).contiguous().view(1, 4, -1)
        pair_nibbles(quads)
        transpose_squares(quads)
        target.copy_(quads.view(4, len(target), -1).permute(1, 2, 0))

    size = max(1, CHUNK_WORDS // (columns // 2))
    in_parallel(turn, zip(torch.split(words, size), torch.split(codes, 4 * size), strict=True))
    scales = _unpadded(fetch("scales").t(), module, layout)
    scaled = fetch(layout.uses[1]).t()[:, : scales.shape[1]]
    # Stored is fp16(-scale * zero).
    zeros = (scaled.float() / -scales.float()).round_()
    wrong = zeros[~((zeros >= 0) & (zeros <= 15))]
    if len(wrong):
        raise CheckpointError(
            f"{layout.uses[1]} over scales make a zero point of {wrong[0]:g}, expected 0 to 15"
        )
    return _tensor(codes, scales, module, layout, zeros.to(torch.uint8))


def read_marlin(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    """int32 [K/16, 2N]: tiles of 16 inputs by 64 outputs, in the order of a tensor core's threads.

    Word (c, m, j) of a tile, 8 x 4 x 4 of them, has in nibble 4l + 2h + e the input 8e + 2m + l and the output
    16j + 8h + c (AutoAWQ, awq/modules/linear/marlin.py, _get_perms).
    """
    rows, columns = module.shape
    tiles = columns // 16
    codes = torch.empty(rows // 64, 4, 2, 8, tiles, 2, dtype=torch.int32)

    def turn(chunk: torch.Tensor, target: torch.Tensor) -> None:
        quads = chunk.t().contiguous().view(-1, 4, 4 * tiles)
        pair_nibbles(quads)
        transpose_squares(quads)
        ordered = quads.view(len(target), 8, 2, 2, 4, tiles).permute(0, 4, 2, 1, 5, 3)
        for half in range(2):
            target[..., half].copy_(ordered[..., half])

    size = max(1, CHUNK_WORDS // (tiles * 128))
    words = torch.split(fetch("qweight"), 128 * size, dim=1)
    in_parallel(turn, zip(words, torch.split(codes, size), strict=True))
    stored = fetch("scales")
    order = _ROW_ORDER if len(stored) == 1 else _GROUP_ORDER
    scales = torch.empty_like(stored)
    scales.view(-1, len(order))[:, order] = stored.view(-1, len(order))
    return _tensor(codes, scales.t(), module, layout, None)


def _unpadded(scales: torch.Tensor, module: Module, layout: Layout) -> torch.Tensor:
    """[N, 8W] → [N, G].

    Raises:
        CheckpointError: the scales do not end where the groups do: the groups are of another size.
    """
    size = _scheme(layout).group_size
    groups = module.shape[1] // size
    used = scales.ne(0).any(dim=0).tolist()
    if used != [column < groups for column in range(len(used))]:
        raise CheckpointError(
            f"scales are not zero in {sum(used)} of {len(used)} columns, expected in the first {groups} (groups of "
            f"{size}); the configuration's group size is wrong"
        )
    return scales[:, :groups]


def _tensor(
    words: torch.Tensor, scales: torch.Tensor, module: Module, layout: Layout, zeros: torch.Tensor | None
) -> QuantTensor:
    """Of int32 words in the order of the codes; without zero points where all of them are the middle."""
    scheme = _scheme(layout)
    half = scales.half().contiguous()
    if not bool(half.isfinite().all()) or not torch.equal(half != 0, scales != 0) or not bool(half.any()):
        least, most = (float(bound) for bound in scales.float().abs().aminmax())
        raise CheckpointError(
            f"scales reach from {least:g} to {most:g}, expected numbers that float16 holds, not all of them zero"
        )
    if zeros is None or bool((zeros == 1 << (scheme.bits - 1)).all()):
        zeros, scheme = None, replace(scheme, mode=Mode.SYM)
    else:
        zeros = zeros.contiguous()
    codes = (
        words.view(torch.uint8)
        .view(module.shape[0], -1)[:, : packed_bytes(module.shape[1], scheme.bits)]
        .contiguous()
    )
    return QuantTensor(codes, half, module.shape, scheme, zeros)


def _scheme(layout: Layout) -> QuantScheme:
    assert layout.scheme is not None
    return layout.scheme
