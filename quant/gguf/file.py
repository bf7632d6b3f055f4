"""GGUF files, versions 2 and 3, little-endian: header, metadata and tensor infos over a memory map. No torch.

Follows the format's specification (ggml, docs/gguf.md). Every count, length and range is checked against the
file's size before it is believed, so that a corrupt file costs neither memory nor time.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.file_range import read_range

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_TENSORS = 1 << 20
MAX_PAIRS = 1 << 16
# Large vocabularies have some 300k tokens and 600k merges; more than this is a corrupt count.
MAX_ARRAY_LENGTH = 1 << 22
MAX_STRING_BYTES = 1 << 24
MAX_NAME_BYTES = 1024
MAX_ARRAY_DEPTH = 3
MAX_DIMS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_DTYPES: dict[int, np.dtype[Any]] = {
    kind: np.dtype(code)
    for kind, code in zip(
        (0, 1, 2, 3, 4, 5, 6, _BOOL, 10, 11, 12),
        ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1", "<u8", "<i8", "<f8"),
        strict=True,
    )
}
# The fewest bytes that a value of a type can take: bounds counts before anything is allocated.
_MIN_BYTES = {**{kind: dtype.itemsize for kind, dtype in _DTYPES.items()}, _STRING: 8, _ARRAY: 12}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A tensor type: rows are blocks of `block_size` values in `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int


GGML_TYPES = {
    kind.id: kind
    for kind in (
        GGMLType(0, "F32", 1, 4),
        GGMLType(1, "F16", 1, 2),
        GGMLType(2, "Q4_0", 32, 18),
        GGMLType(3, "Q4_1", 32, 20),
        GGMLType(6, "Q5_0", 32, 22),
        GGMLType(7, "Q5_1", 32, 24),
        GGMLType(8, "Q8_0", 32, 34),
        GGMLType(9, "Q8_1", 32, 40),
        GGMLType(10, "Q2_K", 256, 84),
        GGMLType(11, "Q3_K", 256, 110),
        GGMLType(12, "Q4_K", 256, 144),
        GGMLType(13, "Q5_K", 256, 176),
        GGMLType(14, "Q6_K", 256, 210),
        GGMLType(15, "Q8_K", 256, 292),
        GGMLType(16, "IQ2_XXS", 256, 66),
        GGMLType(17, "IQ2_XS", 256, 74),
        GGMLType(18, "IQ3_XXS", 256, 98),
        GGMLType(19, "IQ1_S", 256, 50),
        GGMLType(20, "IQ4_NL", 32, 18),
        GGMLType(21, "IQ3_S", 256, 110),
        GGMLType(22, "IQ2_S", 256, 82),
        GGMLType(23, "IQ4_XS", 256, 136),
        GGMLType(24, "I8", 1, 1),
        GGMLType(25, "I16", 1, 2),
        GGMLType(26, "I32", 1, 4),
        GGMLType(27, "I64", 1, 8),
        GGMLType(28, "F64", 1, 8),
        GGMLType(29, "IQ1_M", 256, 56),
        GGMLType(30, "BF16", 1, 2),
        GGMLType(34, "TQ1_0", 256, 54),
        GGMLType(35, "TQ2_0", 256, 66),
        GGMLType(39, "MXFP4", 32, 17),
        GGMLType(40, "NVFP4", 64, 36),
        GGMLType(41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it holds.

    Attributes:
        shape: row-major, outermost first: a linear layer's is (out, in).
        offset: of its first byte, from the start of the file.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_size * self.type.block_bytes


class GGUFFile:
    """An open GGUF file.

    Attributes:
        metadata: every key with its value; arrays are lists.
        tensors: by name, in the file's order.

    Raises:
        CheckpointError: the file is not GGUF, is truncated, or its parts contradict each other.
        UnsupportedFormatError: a version, byte order or tensor type that is not read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("rb")
        try:
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(data, str(self.path))
                n_tensors, n_pairs = reader.header()
                self.metadata: dict[str, Any] = reader.metadata(n_pairs)
                self.tensors: dict[str, TensorInfo] = reader.tensors(n_tensors, self.metadata)
        except ValueError as error:
            self._file.close()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path} is empty, expected a GGUF file") from None

    def data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor, or of a part of one, [rows, row_bytes].

        Several threads may read at once.
        """
        raw = read_range(self.path, self._file.fileno(), info.name, info.offset, info.nbytes)
        return raw.reshape(-1, info.row_bytes)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reader:
    """A cursor over the file's header that believes nothing."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._path = path

    def header(self) -> tuple[int, int]:
        """Check magic and version; the numbers of tensors and of metadata pairs."""
        magic = self._data[:4]
        if magic != MAGIC:
            raise CheckpointError(f"{self._path} starts with {magic!r}, expected {MAGIC!r}: not a GGUF file")
        self._at = 4
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            if version.to_bytes(4, "little")[:2] == b"\0\0":
                raise UnsupportedFormatError(
                    f"{self._path} is big-endian; only little-endian GGUF files are read"
                )
            raise UnsupportedFormatError(
                f"{self._path} has GGUF version {version}; versions 2 and 3 are read"
            )
        n_tensors = self._count("<Q", "the number of tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
        n_pairs = self._count("<Q", "the number of metadata pairs", _MIN_PAIR_BYTES, MAX_PAIRS)
        return n_tensors, n_pairs

    def metadata(self, n_pairs: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for index in range(n_pairs):
            key = self._string(f"the key of metadata pair {index}", MAX_NAME_BYTES)
            if key in pairs:
                raise CheckpointError(f"{self._path}: metadata key {key!r} occurs twice")
            kind = self._number("<I", f"the type of {key!r}")
            pairs[key] = self._value(kind, f"metadata {key!r}", depth=0)
        return pairs

    def tensors(self, n_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self._path}: general.alignment is {alignment!r}, expected a power of two"
            )
        infos: dict[str, TensorInfo] = {}
        for index in range(n_tensors):
            info = self._tensor(index, alignment)
            if info.name in infos:
                raise CheckpointError(f"{self._path}: tensor {info.name!r} occurs twice")
            infos[info.name] = info
        start = -(-self._at // alignment) * alignment
        placed = {
            name: TensorInfo(name, info.type, info.shape, start + info.offset, info.nbytes)
            for name, info in infos.items()
        }
        self._check_ranges(placed)
        return placed

    def _tensor(self, index: int, alignment: int) -> TensorInfo:
        """One tensor info; its offset is still relative to the data section."""
        name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        n_dims = self._number("<I", f"the dimensions of {what}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise CheckpointError(f"{self._path}: {what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        # GGUF lists the innermost dimension first.
        shape = tuple(self._number("<Q", f"the shape of {what}") for _ in range(n_dims))[::-1]
        kind_id = self._number("<I", f"the type of {what}")
        offset = self._number("<Q", f"the offset of {what}")
        kind = GGML_TYPES.get(kind_id)
        if kind is None:
            raise UnsupportedFormatError(f"{self._path}: {what} has the unknown ggml type {kind_id}")
        if min(shape) < 1 or math.prod(shape) > 8 * self._size:
            raise CheckpointError(f"{self._path}: {what} has shape {shape}, impossible in {self._size} bytes")
        if shape[-1] % kind.block_size:
            raise CheckpointError(
                f"{self._path}: {what} has rows of {shape[-1]} values, "
                f"expected a multiple of {kind.block_size} ({kind.name})"
            )
        if offset % alignment:
            raise CheckpointError(
                f"{self._path}: {what} is at offset {offset}, expected a multiple of {alignment}"
            )
        return TensorInfo(name, kind, shape, offset, math.prod(shape) // kind.block_size * kind.block_bytes)

    def _check_ranges(self, tensors: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise CheckpointError(f"{self._path}: tensors {before!r} and {info.name!r} overlap")
            end, before = info.offset + info.nbytes, info.name
            if end > self._size:
                missing = min(end - self._size, info.nbytes)
                raise CheckpointError(
                    f"{self._path} is truncated: {info.name!r} lacks {missing} of its {info.nbytes} bytes"
                    f" (the file has {self._size}, the tensor ends at {end}); fetch the file again"
                )

    def _value(self, kind: int, what: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(what, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(what, depth)
        if kind in _DTYPES:
            return self._numbers(kind, 1, what)[0]
        raise CheckpointError(f"{self._path}: {what} has the unknown value type {kind}, expected 0 to 12")

    def _array(self, what: str, depth: int) -> list[Any]:
        kind = self._number("<I", f"the element type of {what}")
        if kind not in _MIN_BYTES:
            raise CheckpointError(
                f"{self._path}: {what} has the unknown element type {kind}, expected 0 to 12"
            )
        count = self._count("<Q", f"the length of {what}", _MIN_BYTES[kind], MAX_ARRAY_LENGTH)
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            if depth + 1 >= MAX_ARRAY_DEPTH:
                raise CheckpointError(f"{self._path}: {what} nests deeper than {MAX_ARRAY_DEPTH} arrays")
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = _DTYPES[kind]
        start = self._take(count * dtype.itemsize, what)
        values = np.frombuffer(self._data, dtype=dtype, count=count, offset=start)
        result: list[Any] = (values != 0).tolist() if kind == _BOOL else values.tolist()
        return result

    def _strings(self, count: int, what: str) -> list[str]:
        # The hot loop of opening a file (some 100k strings): kept free of calls.
        data, size, at = self._data, self._size, self._at
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                if start > size:
                    break
                at = start + length_at(data, at)[0]
                if at > size:
                    break
                strings.append(data[start:at].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path}: element {len(strings)} of {what} is not UTF-8 ({error.reason})"
            ) from None
        if len(strings) < count:
            raise self._truncated(f"element {len(strings)} of {what}")
        self._at = at
        return strings

    def _string(self, what: str, limit: int) -> str:
        length = self._count("<Q", f"the length of {what}", 1, limit)
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {what} is not UTF-8 ({error.reason})") from None

    def _count(self, code: str, what: str, min_bytes: int, limit: int) -> int:
        count = self._number(code, what)
        if count > limit:
            raise CheckpointError(
                f"{self._path}: {what} is {count}, expected at most {limit}; the file is corrupt"
            )
        if count * min_bytes > self._size - self._at:
            raise CheckpointError(
                f"{self._path}: {what} is {count}, more than the remaining {self._size - self._at} bytes "
                "can hold; the file is truncated or corrupt"
            )
        return count

    def _number(self, code: str, what: str) -> int:
        start = self._take(struct.calcsize(code), what)
        value: int = struct.unpack_from(code, self._data, start)[0]
        return value

    def _take(self, nbytes: int, what: str) -> int:
        """Move past the next `nbytes`; where they start."""
        start = self._at
        if start + nbytes > self._size:
            raise self._truncated(what)
        self._at = start + nbytes
        return start

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is truncated: it ends after {self._size} bytes, within {what}")
