"""Packed weight matrices of the native library, and products with them; calls release the GIL.

The layout is the one that kernels/linear/cpu.h describes. Nothing here may be called where `native.library()` is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from appliance.kernels import native

Precision = Literal["int8", "bf16", "float32"]
Allocate = Callable[[int], torch.Tensor]
"""From a number of bytes to that many, uint8 and 64-byte aligned: a place in memory or in a file."""

CODES = ("u4", "u8", "f16", "bf16", "f32")
SCALES = ("none", "f16", "bf16", "f32", "sub")
OFFSETS = ("constant", "zeros", "biases")
ROWS_OF_BLOCK = 16
COLUMNS_MULTIPLE = 32
GROUP_MULTIPLE = 16
ALIGNMENT = 64

PRECISIONS = ("int8", "bf16", "float32")
_DENSE = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


class Matrix(ctypes.Structure):
    """`struct Matrix` of cpu.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int32),
        ("super", ctypes.c_int32),
        ("codes", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("offsets", ctypes.c_int32),
        ("constant", ctypes.c_float),
        ("has_table", ctypes.c_int32),
        ("table", ctypes.c_uint8 * 16),
        ("data", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("input_width", ctypes.c_int64),
    )


class Target(ctypes.Structure):
    """`struct Target` of cpu.h."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("add", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("bias", ctypes.c_void_p),
    )


class _QuantisedSource(ctypes.Structure):
    """`struct QuantisedSource` of pack.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("columns", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("sub_scales", ctypes.c_void_p),
        ("sub_biases", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Everything about a packed matrix but its bytes; the fields of `struct Matrix`, by names where it has enums."""

    rows: int
    columns: int
    group: int
    codes: str
    scales: str
    input_width: int
    offsets: str = "constant"
    constant: float = 0.0
    super_size: int = 0
    table: tuple[int, ...] | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> MatrixLayout:
        """The inverse of `dataclasses.asdict`, also by way of JSON, which knows no tuples."""
        table = fields["table"]
        return cls(**{**fields, "table": None if table is None else tuple(table)})

    @property
    def blocks(self) -> int:
        return -(-self.rows // ROWS_OF_BLOCK)

    @property
    def nbytes(self) -> int:
        return self.blocks * int(_library().appliance_block_bytes(ctypes.byref(self.matrix(None, None))))

    def matrix(self, data: torch.Tensor | None, inputs: torch.Tensor | None) -> Matrix:
        """For C; both tensors must outlive it."""
        return Matrix(
            rows=self.rows,
            columns=self.columns,
            group=self.group,
            super=self.super_size,
            codes=CODES.index(self.codes),
            scales=SCALES.index(self.scales),
            offsets=OFFSETS.index(self.offsets),
            constant=self.constant,
            has_table=self.table is not None,
            table=(ctypes.c_uint8 * 16)(*(self.table or ())),
            data=_pointer(data),
            inputs=_pointer(inputs),
            input_width=self.input_width,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix [rows, input_width] as native kernels read it.

    Attributes:
        data: uint8 [layout.nbytes], 64-byte aligned.
        inputs: int32 [layout.columns], the input that each column multiplies, -1 for none; None where the first
            `input_width` columns are the inputs in order.
    """

    layout: MatrixLayout
    data: torch.Tensor
    inputs: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.data.dtype is torch.uint8
        assert self.data.is_contiguous()
        assert self.data.numel() == self.layout.nbytes
        assert self.data.data_ptr() % ALIGNMENT == 0
        if self.inputs is not None:
            assert self.inputs.dtype is torch.int32
            assert self.inputs.is_contiguous()
            assert self.inputs.numel() == self.layout.columns

    def matrix(self) -> Matrix:
        """For C; this object must outlive it."""
        return self.layout.matrix(self.data, self.inputs)


def pack_quantised(
    layout: MatrixLayout,
    codes: torch.Tensor,
    bits: int,
    group_size: int,
    scales: torch.Tensor,
    allocate: Allocate,
    *,
    zeros: torch.Tensor | None = None,
    biases: torch.Tensor | None = None,
    sub_scales: torch.Tensor | None = None,
    sub_biases: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> PackedMatrix:
    """Codes with metadata of groups of `group_size` columns into `layout`, whose groups may be padded.

    Args:
        codes: uint8 [N, ceil(K * bits / 8)], streams of bits, the least significant first.
        scales, biases: [N, groups] of the layout's type; with sub-scales fp16 [N, super-blocks].
        zeros: uint8, sub_scales, sub_biases: int8 [N, groups].
        values: int16 [2**bits], the bits of the 16-bit numbers that codes stand for, with such a layout.
        inputs: of `PackedMatrix`.
    """
    tensors = {
        "codes": codes,
        "scales": scales,
        "biases": biases,
        "sub_scales": sub_scales,
        "sub_biases": sub_biases,
        "zeros": zeros,
        "values": values,
    }
    held = {name: None if each is None else each.contiguous() for name, each in tensors.items()}
    packed = PackedMatrix(layout, allocate(layout.nbytes), inputs)
    pointers = {name: _pointer(each) for name, each in held.items()}
    source = _QuantisedSource(bits=bits, group=group_size, columns=layout.input_width, **pointers)
    _library().appliance_pack_quantised(ctypes.byref(packed.matrix()), ctypes.byref(source))
    return packed


def pack_dense(weight: torch.Tensor, allocate: Allocate) -> PackedMatrix:
    """A float16, bfloat16 or float32 matrix [N, K], its values as they are."""
    rows, width = weight.shape
    columns = -(-width // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
    layout = MatrixLayout(rows, columns, columns, _DENSE[weight.dtype], "none", width)
    packed = PackedMatrix(layout, allocate(layout.nbytes))
    weight = weight.contiguous()
    _library().appliance_pack_dense(
        ctypes.byref(packed.matrix()), ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(width)
    )
    return packed


def multiply(matrix: PackedMatrix, x: torch.Tensor, precision: Precision) -> torch.Tensor:
    """x · Wᵀ, each row the same whatever the other rows.

    Args:
        x: float [rows, input_width]; rows may be 0.
        precision: of the activations: "int8" with a scale for each 32 columns (with a matrix that isn't quantised,
            as "float32"), "bf16", or "float32", which is not rounded.

    Returns:
        float32 [rows, N].
    """
    layout = matrix.layout
    x = x.to(torch.float32).contiguous()
    assert x.shape[1:] == (layout.input_width,)
    out = x.new_empty(len(x), layout.rows)
    target = Target(out=_pointer(out), stride=layout.rows, add=0, factor=1.0, bias=None)
    multiply_into(matrix, x, precision, target, range(layout.blocks))
    return out


def multiply_into(
    matrix: PackedMatrix, x: torch.Tensor, precision: Precision, target: Target, blocks: range
) -> None:
    """The 16-row blocks `blocks` of the product of x, contiguous float32 [rows, input_width]."""
    _library().appliance_multiply(
        ctypes.byref(matrix.matrix()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(len(x)),
        ctypes.c_int32(PRECISIONS.index(precision)),
        ctypes.byref(target),
        ctypes.c_int64(blocks.start),
        ctypes.c_int64(blocks.stop),
    )


def read_rows(matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
    """Weights of some rows: int64 [M], each within the matrix → float32 [M, input_width]."""
    rows = rows.to(torch.int64).contiguous()
    out = torch.empty(len(rows), matrix.layout.input_width)
    if len(rows):
        assert 0 <= int(rows.min()) <= int(rows.max()) < matrix.layout.rows
    _library().appliance_read_rows(
        ctypes.byref(matrix.matrix()),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(out.data_ptr()),
    )
    return out


def _library() -> ctypes.CDLL:
    library = native.library()
    assert library is not None
    return library


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
