"""One safetensors file: its header, and the bytes of a tensor. No torch.

Follows the format's description (huggingface/safetensors, README): eight bytes of header length, a JSON header, then
the data. Nothing is believed before it is checked against the file's size.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.file_range import read_range

# As the reference implementation allows.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it holds.

    Attributes:
        dtype: safetensors' name of it, e.g. "BF16".
        offset: of its first byte, from the start of the file.
        step, start: of what is stored, the rows start, start + step, …; 1 and 0 where it is all of it.
        transposed: it is stored with its two dimensions exchanged.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    step: int = 1
    start: int = 0
    transposed: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the bytes that `read_bytes` gives."""
        if self.step == 1 and not self.transposed:
            return self.shape
        shape = (self.shape[0] * self.step, *self.shape[1:])
        return shape[::-1] if self.transposed else shape


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a file, by name.

    Raises:
        CheckpointError: the file is not safetensors, is truncated, or its header contradicts itself.
        UnsupportedFormatError: a dtype that is not known.
        OSError: the file cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} has {size} bytes and a header of {length}; it is cut short or no safetensors file"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); fetch the file again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    infos = [_info(path, name, entry, 8 + length) for name, entry in header.items()]
    _check_ranges(path, infos, 8 + length, size)
    return {info.name: info for info in infos}


def read_bytes(info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The raw bytes of what is stored.

    Raises:
        CheckpointError: the file was cut short meanwhile.
        OSError: it cannot be read.
    """
    with info.file.open("rb", buffering=0) as file:
        return read_range(info.file, file.fileno(), info.name, info.offset, info.nbytes * info.step)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a key occurs twice")
    return names


def _info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    what = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is described by {entry!r}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UnsupportedFormatError(f"{what} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{what} has shape {shape!r}, expected at most {MAX_DIMS} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise CheckpointError(f"{what} has data_offsets {offsets!r}, expected a start and an end")
    nbytes = offsets[1] - offsets[0]
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes != needed:
        raise CheckpointError(f"{what}, {dtype} {shape}, has {nbytes} bytes, expected {needed}")
    return TensorInfo(name, path, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)


def _check_ranges(path: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    end, before = start, "the header"
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            raise CheckpointError(f"{path}: tensor {info.name!r} overlaps {before}")
        end, before = info.offset + info.nbytes, repr(info.name)
        if end > size:
            missing = min(end - size, info.nbytes)
            raise CheckpointError(
                f"{path} is truncated: {info.name!r} lacks {missing} of its {info.nbytes} bytes "
                f"(the file has {size}, the tensor ends at {end}); fetch the file again"
            )
