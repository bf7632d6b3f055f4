"""`Batch`: a step plan as the index tensors that every layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from appliance.engine.types import HOLE, PlanRow
from appliance.kernels.paged_attention import QUERY_TILE, kv_tiles


@dataclass(frozen=True, slots=True)
class GroupIndex:
    """Where one KV group keeps the batch's tokens; shapes as `paged_attention` and `kv_write` take them."""

    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """All tensors are int64.

    Attributes:
        token_ids, positions: [tokens], the rows of the plan one after the other.
        groups: one per KV group.
        query_rows, query_positions: [items, QUERY_TILE].
        active: for each of the `kv_tiles`, how many leading items reach into it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupIndex, ...]
    query_rows: torch.Tensor
    query_positions: torch.Tensor
    active: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    """A tile of consecutive tokens of one plan row: the attention kernel's unit of work."""

    row: PlanRow
    rows: list[int]
    positions: list[int]


def build_batch(rows: Sequence[PlanRow], block_size: int) -> Batch:
    """Lay the rows of a plan out, of which there is at least one."""
    token_ids: list[int] = []
    positions: list[int] = []
    items: list[_Item] = []
    for row in rows:
        items += _items(row, first=len(token_ids))
        token_ids += row.token_ids
        positions += range(row.start, row.start + row.n_tokens)
    items.sort(key=lambda item: -item.positions[-1])
    tiles = kv_tiles(items[0].positions[-1] + 1)
    width = tiles[-1][1] // block_size
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        groups=tuple(_group(rows, items, g, width, block_size) for g in range(len(rows[0].tables))),
        query_rows=torch.tensor([item.rows for item in items]),
        query_positions=torch.tensor([item.positions for item in items]),
        active=tuple(sum(item.positions[-1] >= start for item in items) for start, _ in tiles),
    )


def _items(row: PlanRow, first: int) -> list[_Item]:
    items = []
    for start in range(0, row.n_tokens, QUERY_TILE):
        # A tile that is not full repeats its last token.
        offsets = [min(start + lane, row.n_tokens - 1) for lane in range(QUERY_TILE)]
        items.append(_Item(row, [first + o for o in offsets], [row.start + o for o in offsets]))
    return items


def _group(
    rows: Sequence[PlanRow], items: list[_Item], group: int, width: int, block_size: int
) -> GroupIndex:
    blocks: list[int] = []
    offsets: list[int] = []
    padded: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        table = row.tables[group]
        for position in range(row.start, row.start + row.n_tokens):
            blocks.append(table[position // block_size])
            offsets.append(position % block_size)
        # Holes, and what is not written yet, are filled with a block of the same sequence: it is masked, but not a
        # number times nothing would still not be a number, and nobody else's memory may do that to this row.
        seen = table[: (row.start + row.n_tokens - 1) // block_size + 1]
        seen = tuple(seen[-1] if block == HOLE else block for block in seen)
        padded[row.request_id, row.index] = [*seen, *([seen[-1]] * (width - len(seen)))]
    return GroupIndex(
        write_blocks=torch.tensor(blocks),
        write_offsets=torch.tensor(offsets),
        tables=torch.tensor([padded[item.row.request_id, item.row.index] for item in items]),
    )
