"""A step plan as tensors on the GPU, which reach it in one copy that nothing waits for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from appliance.engine.types import PlanRow
from appliance.kernels.paged_attention.gpu import SEGMENT

# Tensors start at multiples of 16 bytes, whatever their lengths: kernels are compiled for that.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """Shapes as the kernels take them; all tensors are int32.

    Attributes:
        token_ids, positions: [tokens], the rows of the plan one after the other.
        starts: [rows + 1], of each row its first token, and the end.
        contexts: [rows], tokens of each sequence by the end of the step.
        offsets: [tokens], places inside the blocks that keys and values are written to.
        blocks: of each KV group [tokens], these blocks.
        tables: of each KV group [rows, blocks of whole segments].
        counts: tokens of each row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    offsets: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]


def build_gpu_batch(rows: Sequence[PlanRow], block_size: int, device: torch.device) -> GpuBatch:
    """Lay the rows of a plan out, of which there is at least one."""
    groups = range(len(rows[0].tables))
    positions = [range(row.start, row.start + row.n_tokens) for row in rows]
    width = max(len(table) for row in rows for table in row.tables)
    width += -width % (SEGMENT // block_size)
    pieces = [
        array("i", (token for row in rows for token in row.token_ids)),
        array("i", (position for each in positions for position in each)),
        array("i", accumulate((row.n_tokens for row in rows), initial=0)),
        array("i", (row.start + row.n_tokens for row in rows)),
        array("i", (position % block_size for each in positions for position in each)),
    ]
    for group in groups:
        blocks = (
            row.tables[group][position // block_size]
            for row, each in zip(rows, positions, strict=True)
            for position in each
        )
        pieces.append(array("i", blocks))
    for group in groups:
        pieces.append(array("i"))
        for row in rows:
            pieces[-1].extend(row.tables[group])
            pieces[-1].frombytes(bytes(4 * (width - len(row.tables[group]))))
    token_ids, of_positions, starts, contexts, offsets, *rest = _to_device(pieces, device)
    return GpuBatch(
        token_ids,
        of_positions,
        starts,
        contexts,
        offsets,
        tuple(rest[: len(groups)]),
        tuple(table.view(len(rows), width) for table in rest[len(groups) :]),
        tuple(row.n_tokens for row in rows),
    )


def _to_device(pieces: Iterable[array[int]], device: torch.device) -> list[torch.Tensor]:
    joined, places = array("i"), []
    for piece in pieces:
        places.append((len(joined), len(piece)))
        joined.extend(piece)
        joined.frombytes(bytes(4 * (-len(piece) % _ALIGNED)))
    host = torch.frombuffer(joined, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    there = host.to(device, non_blocking=True)
    return [there[start : start + length] for start, length in places]
