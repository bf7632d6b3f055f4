"""Paged attention by the native library, on pools laid out as cpu.h says; calls release the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

# Tokens of one `Item` at most, and its heads' elements.
QUERY_TOKENS = 32
MAX_HEAD_DIM = 512
BLOCK_SIZES = (16, 32, 64, 128, 256)


class KvType(IntEnum):
    float32 = 0
    bfloat16 = 1
    int8 = 2


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("type", "kv_heads", "head_dim", "block_size", "layers")]


class _Attention(ctypes.Structure):
    _fields_ = [
        ("shape", _Shape),
        ("layer", ctypes.c_void_p),
        ("kv_head", ctypes.c_int32),
        ("query_heads", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("first_position", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a pool holds: keys and values of `layers` layers, `kv_heads` heads of `head_dim` elements."""

    type: KvType
    kv_heads: int
    head_dim: int
    block_size: int
    layers: int

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}, native attention takes one of {BLOCK_SIZES}")
        if not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {self.head_dim}, native attention takes up to {MAX_HEAD_DIM}")

    @property
    def tile_bytes(self) -> int:
        """Keys, or values, of 16 tokens in one layer and head."""
        width = -(-self.head_dim // 16) * 16
        if self.type is KvType.int8:
            return 16 * width + 64
        return (64 if self.type is KvType.float32 else 32) * width

    @property
    def block_bytes(self) -> int:
        """All layers and heads of `block_size` tokens."""
        return self.tile_bytes * (self.block_size // 16) * self.kv_heads * 2 * self.layers

    def native(self) -> _Shape:
        """For C."""
        return _Shape(self.type, self.kv_heads, self.head_dim, self.block_size, self.layers)


@dataclass(frozen=True, slots=True)
class Item:
    """Consecutive tokens of one sequence, up to QUERY_TOKENS.

    Attributes:
        row: of the queries, where its first token is.
        tokens: how many.
        first_position: position of the first one in the sequence; keys of all are in the pool already.
        table: the block of each `block_size` tokens; below zero where none of these tokens sees it.
    """

    row: int
    tokens: int
    first_position: int
    table: Sequence[int]


def kv_write(
    lib: ctypes.CDLL,
    shape: KvShape,
    pool: torch.Tensor,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Store keys and values [tokens, kv_heads, head_dim], float32, of tokens in ascending order.

    Args:
        pool: uint8, [blocks · block_bytes].
        blocks, offsets: the block of each token and its place inside it.
    """
    count = len(blocks)
    assert keys.shape == values.shape == (count, shape.kv_heads, shape.head_dim)
    native = shape.native()
    lib.appliance_kv_write(
        ctypes.byref(native),
        _layer(shape, pool, layer),
        (ctypes.c_int32 * count)(*blocks),
        (ctypes.c_int32 * count)(*offsets),
        ctypes.c_int64(count),
        ctypes.c_void_p(_floats(keys).data_ptr()),
        ctypes.c_void_p(_floats(values).data_ptr()),
    )


def paged_attention(
    lib: ctypes.CDLL,
    shape: KvShape,
    pool: torch.Tensor,
    layer: int,
    q: torch.Tensor,
    items: Sequence[Item],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    in_segments: bool = False,
) -> torch.Tensor:
    """Causal attention of the items' queries; see the reference for the other arguments.

    Args:
        q: [rows, heads, head_dim], float32.
        in_segments: as threads share a long context: segments apart, then merged. The same bits.

    Returns:
        [rows, heads, head_dim], float32; zeros in rows of no item.
    """
    heads = q.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    calls = []
    tables = [(ctypes.c_int32 * len(item.table))(*item.table) for item in items]
    for item, table in zip(items, tables, strict=True):
        assert 0 < item.tokens <= QUERY_TOKENS
        assert item.row + item.tokens <= len(q)
        assert item.first_position + item.tokens <= len(table) * shape.block_size
        group = heads // shape.kv_heads
        for head in range(shape.kv_heads):
            at = item.row * heads * shape.head_dim + head * group * shape.head_dim
            calls.append(
                _Attention(
                    shape.native(),
                    _layer(shape, pool, layer),
                    head,
                    group,
                    ctypes.addressof(table),
                    item.first_position,
                    item.tokens,
                    window,
                    scale,
                    softcap,
                    None if sinks is None else _floats(sinks).data_ptr() + 4 * head * group,
                    _floats(q).data_ptr() + 4 * at,
                    out.data_ptr() + 4 * at,
                    heads * shape.head_dim,
                    heads * shape.head_dim,
                )
            )
    if in_segments:
        for call in calls:
            partials = torch.empty(lib.appliance_attention_partials(ctypes.byref(call)))
            lib.appliance_attend_segments(ctypes.byref(call), ctypes.c_void_p(partials.data_ptr()))
    else:
        lib.appliance_attend((_Attention * len(calls))(*calls), ctypes.c_int64(len(calls)))
    return out


def _layer(shape: KvShape, pool: torch.Tensor, layer: int) -> ctypes.c_void_p:
    assert pool.dtype is torch.uint8
    assert pool.is_contiguous()
    return ctypes.c_void_p(pool.data_ptr() + layer * (shape.block_bytes // shape.layers))


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return tensor
