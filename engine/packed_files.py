"""Where the repacked weights of a model are kept, and the head of such a file. Imports no torch.

A file begins with a head of `HEAD_BYTES`, then come the regions of data, then a table (JSON) that names them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

FORMAT_VERSION = 1
HEAD_BYTES = 4096
SUFFIX = ".packed"
_TEMPORARY = ".tmp"
_MAGIC = b"APPLPACK"
# magic, versions of the file and of the packing, content, identity, size of the file, the table's place and checksum
_HEAD = struct.Struct("<8sII32s32sQQQI")
_CRC = struct.Struct("<I")
# A file that was changed less than this before it was looked at may be changed again without another time of change.
SETTLED_S = 2.0
_UNKNOWN = bytes(32)


class PackedFileError(Exception):
    """A file of repacked weights cannot be used; the message says why."""


class Region(msgspec.Struct, frozen=True):
    """Bytes of the file, and their checksum."""

    offset: int
    num_bytes: int
    checksum: int


class Entry(msgspec.Struct, frozen=True):
    """A packed matrix: what the packing says of it, its data, and the inputs of its columns where not in order."""

    layout: dict[str, bool | int | float | str | list[int] | None]
    data: Region
    inputs: Region | None


class Table(msgspec.Struct, frozen=True):
    """All that is in a file, and the path of the model it was made from."""

    model: str
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Head:
    """What a file says of itself first. `content` and `identity` are those of the model that it was made from."""

    layout_version: int
    content: bytes
    identity: bytes
    file_bytes: int
    table_offset: int
    table_bytes: int
    table_crc: int

    def encode(self) -> bytes:
        packed = _HEAD.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.layout_version,
            self.content,
            self.identity,
            self.file_bytes,
            self.table_offset,
            self.table_bytes,
            self.table_crc,
        )
        return packed + _CRC.pack(zlib.crc32(packed))

    @staticmethod
    def decode(found: bytes, layout_version: int, file_bytes: int) -> Head:
        """Raises PackedFileError where it is damaged, of another version, or of a file of another size."""
        if len(found) < _HEAD.size + _CRC.size or found[: len(_MAGIC)] != _MAGIC:
            raise PackedFileError("it does not begin as such a file does")
        packed, (crc,) = found[: _HEAD.size], _CRC.unpack_from(found, _HEAD.size)
        _, version, layout, *rest = _HEAD.unpack(packed)
        if zlib.crc32(packed) != crc:
            raise PackedFileError("its head is damaged")
        if (version, layout) != (FORMAT_VERSION, layout_version):
            raise PackedFileError(
                f"it is of version {version}.{layout}, expected {FORMAT_VERSION}.{layout_version}"
            )
        head = Head(layout, *rest)
        if head.file_bytes != file_bytes or head.table_offset + head.table_bytes != file_bytes:
            raise PackedFileError(f"it has {file_bytes} bytes, expected {head.file_bytes}")
        return head


def read_table(handle: int, head: Head) -> Table:
    """Raises PackedFileError where it is damaged."""
    found = os.pread(handle, head.table_bytes, head.table_offset)
    if zlib.crc32(found) != head.table_crc:
        raise PackedFileError("its table is damaged")
    try:
        return msgspec.json.decode(found, type=Table)
    except msgspec.DecodeError as error:
        raise PackedFileError(f"its table is not as it should be: {error}") from None


def places(model: Path) -> tuple[Path, Path]:
    """Where the weights of a model are kept: with it, and where nothing can be written there."""
    # A link may be ours, to a folder of the user's: nothing is put there.
    is_folder = model.is_dir() and not model.is_symlink()
    beside = model / SUFFIX if is_folder else model.with_name(model.name + SUFFIX)
    name = hashlib.sha256(os.fsencode(os.path.abspath(model))).hexdigest()[:32]
    return beside, _elsewhere() / name


def is_packed_file(name: str) -> bool:
    """Whether a file in a model's folder is none of its own, but repacked weights, finished or not."""
    return name == SUFFIX or (name.startswith(SUFFIX + ".") and name.endswith(_TEMPORARY))


def remove(model: Path) -> int:
    """Delete what is kept of a model, anywhere; how many bytes that were."""
    freed = 0
    for place in places(model):
        for path in (place, *temporaries(place)):
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                freed += size
    return freed


def temporary(place: Path) -> tuple[int, Path]:
    """A new file to be renamed to `place`: locked by whoever writes it, so that others can tell it from a rest."""
    place.parent.mkdir(parents=True, exist_ok=True)
    path = place.with_name(f"{place.name}.{os.getpid()}-{os.urandom(4).hex()}{_TEMPORARY}")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle, path


def temporaries(place: Path) -> list[Path]:
    """The unfinished files for `place`."""
    prefix = f"{place.name}."
    with contextlib.suppress(OSError):
        return [
            p for p in place.parent.iterdir() if p.name.startswith(prefix) and p.name.endswith(_TEMPORARY)
        ]
    return []


def remove_rests(place: Path) -> None:
    """Delete unfinished files whose writers are gone, and elsewhere the files of models that are gone."""
    paths = temporaries(place)
    if place.parent == _elsewhere() and place.parent.is_dir():
        paths = list(place.parent.iterdir())
    for path in paths:
        with contextlib.suppress(OSError, PackedFileError):
            if path.name.endswith(_TEMPORARY):
                with _locked(path):
                    path.unlink()
            elif not Path(_model_of(path)).exists():
                path.unlink()


def model_files(model: Path) -> list[Path]:
    """The files that a model's weights are read from: itself, or in a folder what is weights or configuration."""
    if not model.is_dir():
        return [model]
    return sorted(
        path for path in model.iterdir() if path.suffix in (".safetensors", ".json") and path.is_file()
    )


def identity(files: Sequence[Path]) -> tuple[bytes, bool]:
    """What changes whenever one of the files does, from their metadata; and whether it can be relied on yet.

    As git's index has it: size, times of change, inode and device.
    """
    hashed = hashlib.sha256()
    newest = 0
    for file in files:
        stat = file.stat()
        newest = max(newest, stat.st_mtime_ns, stat.st_ctime_ns)
        facts = (file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
        hashed.update(repr(facts).encode())
    return hashed.digest(), newest < time.time_ns() - int(SETTLED_S * 1e9)


@dataclass(frozen=True, slots=True)
class Content:
    """The SHA-256 of files' names and bytes, and their identity while it was computed.

    Attributes:
        known_as: the identity to remember, zeros where it cannot be relied on yet.
    """

    digest: bytes
    identity: bytes
    known_as: bytes


def content(files: Sequence[Path]) -> Content:
    """Read the files through.

    Raises:
        PackedFileError: they were changed meanwhile.
        OSError: one cannot be read.
    """
    before, is_settled = identity(files)
    hashed = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    for file in files:
        hashed.update(f"{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                hashed.update(buffer[:count])
    if identity(files)[0] != before:
        raise PackedFileError("the model's files are being changed")
    return Content(hashed.digest(), before, before if is_settled else _UNKNOWN)


def _elsewhere() -> Path:
    return Path(platformdirs.user_cache_dir("appliance")) / "packed"


def _model_of(path: Path) -> str:
    with path.open("rb") as opened:
        found = opened.read(_HEAD.size + _CRC.size)
        layout_version = _HEAD.unpack(found[: _HEAD.size])[2] if len(found) >= _HEAD.size else 0
        head = Head.decode(found, layout_version, path.stat().st_size)
        return read_table(opened.fileno(), head).model


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises BlockingIOError while somebody else has it locked."""
    with path.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
