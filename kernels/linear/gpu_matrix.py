"""Quantised matrices in the layout of the GPU kernels, and back; plain torch, on any device.

The layout is in tiles of 64 rows by one *block* of columns, 256 codes of 2 bits, 128 of 4 or 64 of 8. A row's block
is 16 words of 32 bits, and a word has 16 / bits *spans*: of span i and word r, column 32i + 2r stands in the low half
word and its neighbour 32i + 2r + 1 in the high one, both at bit bits * i. So one shift and one mask give a pair of
codes as tensor cores want them, and the codes that a warp wants are where it has them already. With a table, where
nibbles select bytes and halves do not matter, the two stand side by side: at bits 8i and 8i + 4.

Rows are padded to tiles and columns to blocks, with zeros; whoever multiplies reads no input of a padded column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILE_ROWS = 64
WORDS = 16
SPAN = 32
BITS = (2, 4, 8)
GROUPS = (16, 32, 64)
"""Those that are smaller than any block; others are multiples of a block."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class GpuMatrix:
    """A matrix [rows, columns]: w = scale * (code - zero), or scale * code + bias, or scale * table[code].

    T = ceil(rows / 64) tiles, B = ceil(columns / block) blocks, G groups and S super-blocks of all padded columns.
    Metadata fill words of 32 bits: P groups of a row, as many as fit, stand side by side. Those of padded rows and
    groups are zeros.

    Attributes:
        rows, columns: of the matrix, as it was before padding.
        bits: 2, 4 or 8.
        group: columns that share their metadata: 16, 32, 64 or a multiple of a block.
        zero: what is subtracted from codes where there are neither zeros, biases nor a table.
        codes: int32 [T, B, 64, 16].
        scales: float16, bfloat16 or float32 [ceil(G / P), 64 T, P]; with super-blocks int8.
        zeros: uint8 [ceil(G / 4), 64 T, 4], of codes of less than 8 bits none above 127; or None.
        biases: as scales, in place of zeros, or None.
        super_group: columns of a super-block, a multiple of a block; 0 without.
        super_scales: float16, bfloat16 or float32 [ceil(S / P), 64 T, P], which scales are multiplied by.
        super_biases: the same for biases.
        table: int32 [2, 8] with the 16 entries as float16, then as bfloat16: their low bytes in 4 words, then the high
            ones. Only with 4 bits.
        inputs: int32 [columns], the input that a column multiplies, -1 for none; None where it is that of its number.
        input_width: K, the number of inputs.
    """

    rows: int
    columns: int
    bits: int
    group: int
    zero: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    biases: torch.Tensor | None
    super_group: int
    super_scales: torch.Tensor | None
    super_biases: torch.Tensor | None
    table: torch.Tensor | None
    inputs: torch.Tensor | None
    input_width: int

    @property
    def block(self) -> int:
        return block_columns(self.bits)

    @property
    def nbytes(self) -> int:
        tensors = (getattr(self, name) for name in self.__slots__)
        return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))


def block_columns(bits: int) -> int:
    """How many columns have their codes in 16 words."""
    return SPAN * WORDS // bits


def fits(bits: int, columns: int) -> bool:
    """Whether so many columns can be a group (or super-block) without padding."""
    block = block_columns(bits)
    return columns % block == 0 or (columns < block and columns in (*GROUPS, block // 2))


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    columns: int,
    group: int,
    zero: int = 0,
    zeros: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    super_group: int = 0,
    super_scales: torch.Tensor | None = None,
    super_biases: torch.Tensor | None = None,
    table: tuple[float, ...] | None = None,
    inputs: torch.Tensor | None = None,
    input_width: int | None = None,
) -> GpuMatrix:
    """Codes and metadata with a row for each output as a matrix for the GPU, without loss.

    Args:
        codes: uint8 [rows, ceil(columns * bits / 8)]; of those in a byte the lowest is the first.
        scales, zeros, biases: [rows, groups], of the types of `GpuMatrix`.
        super_scales, super_biases: [rows, super-blocks].
        table: 16 numbers, each exact as float16 and as bfloat16.
        group, zero, super_group, inputs: of `GpuMatrix`.
        input_width: None for `columns`.
    """
    assert bits in BITS
    assert fits(bits, group)
    assert super_group % block_columns(bits) == 0
    assert codes.dtype is torch.uint8
    assert codes.shape[1] == -(-columns * bits // 8)
    assert (super_group > 0) == (super_scales is not None) == (scales.dtype is torch.int8)
    # As bfloat16, 128 and 7 bits beside it are exact. Formats store zero points in as many bits as codes.
    assert zeros is None or bits == 8 or int(zeros.max()) <= 127, (
        "a zero point above 127 of codes of less than 8 bits"
    )
    assert table is None or (bits == 4 and len(table) == 1 << bits)
    blocks = -(-columns // block_columns(bits))
    padded = blocks * block_columns(bits)
    groups, supers = -(-padded // group), -(-padded // super_group) if super_group else 0
    return GpuMatrix(
        rows=len(codes),
        columns=columns,
        bits=bits,
        group=group,
        zero=zero,
        codes=_pack_words(codes, bits, blocks, beside=table is not None),
        scales=_by_group(scales, groups),
        zeros=None if zeros is None else _by_group(zeros, groups),
        biases=None if biases is None else _by_group(biases, groups),
        super_group=super_group,
        super_scales=None if super_scales is None else _by_group(super_scales, supers),
        super_biases=None if super_biases is None else _by_group(super_biases, supers),
        table=None if table is None else _pack_table(table).to(codes.device),
        inputs=inputs,
        input_width=columns if input_width is None else input_width,
    )


def unpack(matrix: GpuMatrix) -> torch.Tensor:
    """The weights, float32 [rows, columns], each the float32 number that its formula gives."""
    values = unpack_codes(matrix).float()
    if matrix.table is not None:
        values = _unpack_table(matrix.table).to(values.device)[values.int()]
    elif matrix.zeros is not None:
        values -= _by_column(matrix, matrix.zeros, matrix.group)
    elif matrix.biases is None:
        values -= matrix.zero
    weights = values * _scaled(matrix, matrix.scales, matrix.super_scales)
    return weights if matrix.biases is None else weights + _scaled(matrix, matrix.biases, matrix.super_biases)


def unpack_codes(matrix: GpuMatrix) -> torch.Tensor:
    """The codes, uint8 [rows, columns]."""
    tiles, blocks = matrix.codes.shape[:2]
    spans = WORDS // matrix.bits
    codes = matrix.codes.new_empty(tiles, TILE_ROWS, blocks, spans, WORDS, 2, dtype=torch.uint8)
    for span, half, shift in _places(matrix.bits, beside=matrix.table is not None):
        found = matrix.codes >> shift & ((1 << matrix.bits) - 1)
        codes[:, :, :, span, :, half] = found.transpose(1, 2).to(torch.uint8)
    return codes.view(tiles * TILE_ROWS, -1)[: matrix.rows, : matrix.columns]


def _places(bits: int, *, beside: bool) -> Iterator[tuple[int, int, int]]:
    """Span, which of a pair, and the place of its lowest bit in the word."""
    for span in range(WORDS // bits):
        for half in range(2):
            yield span, half, 2 * bits * span + bits * half if beside else bits * span + 16 * half


def _pack_words(codes: torch.Tensor, bits: int, blocks: int, *, beside: bool) -> torch.Tensor:
    tiles = -(-len(codes) // TILE_ROWS)
    width = blocks * block_columns(bits) * bits // 8
    codes = torch.nn.functional.pad(codes, (0, width - codes.shape[1], 0, tiles * TILE_ROWS - len(codes)))
    # One code a byte, all of a row.
    codes = torch.stack([codes >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=-1)
    pairs = codes.view(tiles, TILE_ROWS, blocks, WORDS // bits, WORDS, 2)
    words = codes.new_zeros(tiles, blocks, TILE_ROWS, WORDS, dtype=torch.int32)
    for span, half, shift in _places(bits, beside=beside):
        words |= pairs[:, :, :, span, :, half].transpose(1, 2).int() << shift
    return words


def _by_group(by_row: torch.Tensor, groups: int) -> torch.Tensor:
    """[rows, some of the groups] → [ceil(groups / P), padded rows, P]."""
    rows, found = by_row.shape
    per_word = 4 // by_row.itemsize
    padding = (0, -(-groups // per_word) * per_word - found, 0, -rows % TILE_ROWS)
    padded = torch.nn.functional.pad(by_row, padding)
    return padded.view(len(padded), -1, per_word).transpose(0, 1).contiguous()


def _by_column(matrix: GpuMatrix, by_group: torch.Tensor, columns: int) -> torch.Tensor:
    """[ceil(groups / P), padded rows, P] → [rows, columns]."""
    by_row = by_group[:, : matrix.rows].transpose(0, 1).flatten(1)
    return by_row.repeat_interleave(columns, dim=1)[:, : matrix.columns]


def _scaled(matrix: GpuMatrix, by_group: torch.Tensor, supers: torch.Tensor | None) -> torch.Tensor:
    factors = _by_column(matrix, by_group, matrix.group).float()
    return factors if supers is None else factors * _by_column(matrix, supers, matrix.super_group).float()


def _pack_table(table: tuple[float, ...]) -> torch.Tensor:
    exact = torch.tensor(table)
    rows = []
    for dtype in (torch.float16, torch.bfloat16):
        entries = exact.to(dtype)
        assert torch.equal(entries.float(), exact)
        rows.append(entries.view(torch.uint8).view(-1, 2).t().contiguous().view(torch.int32).flatten())
    return torch.stack(rows)


def _unpack_table(table: torch.Tensor) -> torch.Tensor:
    """float32 [16]."""
    return table[0].view(2, 4).view(torch.uint8).t().contiguous().view(torch.float16).flatten().float()
