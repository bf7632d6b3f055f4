"""Repacked weights, kept in one file beside their model, mapped into memory and shared between processes.

The first load packs straight into the mapping of a temporary file, which then gets its name by a rename; later loads
map that. It is believed only if its head, its table and all data have the checksums they should have, and if it was
made from the same bytes: their SHA-256 is remembered with the identity of the model's files, as git's index does,
and computed again when that differs. Nothing is flushed to the disk: what a power cut leaves fails these checks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from appliance.engine import packed_files
from appliance.engine.packed_files import HEAD_BYTES, Entry, Head, PackedFileError, Region, Table
from appliance.kernels.checksum import checksum
from appliance.kernels.memory import anonymous

ALIGNMENT = 64
# Disk space is taken in steps, so that a full disk is an error here and no signal on writing to the mapping.
_STEP_BYTES = 2**26
# Packed weights take at most about twice what the model's files do; address space costs nothing.
_ROOM_FACTOR = 4
log = logging.getLogger("appliance.engine")


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix; `data` uint8 and `inputs` int32 must not be written to.

    Attributes:
        layout: what the packing says of it, made of what JSON has.
    """

    layout: dict[str, Any]
    data: torch.Tensor
    inputs: torch.Tensor | None


class WeightCache:
    """The cache of one model: `open`, then either `get` everything, or `allocate`, `add` and at last `commit`.

    `allocate` and `add` may be called from several threads. What they and `get` hand out outlives the cache.

    Attributes:
        note: why nothing will be kept, "" where something is.
    """

    def __init__(self, model: Path, files: Sequence[Path], layout_version: int, threads: int) -> None:
        self._model, self._files, self._layout_version = model, files, layout_version
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._reader: _Reader | None = None
        self._writer: _Writer | None = None
        self._content: Future[packed_files.Content] | None = None
        self.note = ""

    @classmethod
    def open(cls, model: Path, files: Sequence[Path], layout_version: int, threads: int) -> WeightCache:
        """The weights kept of a model, else a file to keep them in.

        Args:
            files: what the model is read from: `packed_files.model_files`.
            layout_version: of the packing and of the names; what another one wrote is not read.
            threads: how many check at once.
        """
        cache = cls(model, files, layout_version, threads)
        for place in packed_files.places(model):
            if cache._read(place):
                return cache
        cache._create()
        return cache

    @property
    def is_filled(self) -> bool:
        """Whether the weights are there, to be had by `get`."""
        return self._reader is not None

    def get(self, name: str) -> Packed | None:
        """A packed matrix; None where it is to be packed."""
        if self._reader is None:
            return None
        packed = self._reader.get(name)
        if packed is None:
            log.info("%s has no %s; the weights are packed again at the next load", self._reader.path, name)
            with contextlib.suppress(OSError):
                self._reader.path.unlink()
        return packed

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory to pack into, uint8 [num_bytes] of zeros, aligned to 64 bytes: of the file, or of our own."""
        if self._writer:
            try:
                return self._writer.allocate(num_bytes)
            except OSError as error:
                self._give_up(error)
        return anonymous(num_bytes, huge_pages=True)

    def add(self, name: str, layout: dict[str, Any], data: torch.Tensor, inputs: torch.Tensor | None) -> None:
        """Keep a packed matrix; `data` is as it came from `allocate`, `inputs` int32 from anywhere."""
        writer = self._writer
        if writer:
            try:
                writer.add(name, layout, data, inputs)
            except OSError as error:
                self._give_up(error)

    def commit(self) -> None:
        """Give the file its name, from when on others see it."""
        if not self._writer:
            return
        assert self._content is not None
        try:
            content = self._content.result()
            if packed_files.identity(self._files)[0] != content.identity:
                raise PackedFileError("the model's files were changed while they were read")
            self._writer.commit(str(self._model), self._layout_version, content)
        except (OSError, PackedFileError) as error:
            self._give_up(error)
        else:
            for place in packed_files.places(self._model):
                if place != self._writer.place:  # an older one
                    with contextlib.suppress(OSError):
                        place.unlink()
            self._writer = None

    def __enter__(self) -> WeightCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._writer:
            self._writer.discard()

    def _read(self, place: Path) -> bool:
        try:
            reader = _Reader(place, self._layout_version)
        except FileNotFoundError:
            return False
        except (OSError, PackedFileError) as error:
            log.info("%s: %s; the weights are packed again", place, error)
            return False
        try:
            reader.check_model(self._files)
            reader.check_data(self._pool, self._threads)
        except (OSError, PackedFileError) as error:
            log.info("%s: %s; the weights are packed again", place, error)
            return False
        self._reader = reader
        return True

    def _create(self) -> None:
        for place in packed_files.places(self._model):
            packed_files.remove_rests(place)
            try:
                room = sum(file.stat().st_size for file in self._files) * _ROOM_FACTOR + _STEP_BYTES
                self._writer = _Writer(place, room)
            except OSError as error:
                self.note = _note(error)
                continue
            self.note = ""
            self._content = self._pool.submit(packed_files.content, self._files)
            return

    def _give_up(self, error: Exception) -> None:
        writer, self._writer = self._writer, None
        if writer:
            self.note = _note(error)
            writer.discard()


class _Reader:
    """A finished file, mapped; nothing in it is believed before it is checked."""

    def __init__(self, path: Path, layout_version: int) -> None:
        self.path = path
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            self._head = Head.decode(os.pread(handle, HEAD_BYTES, 0), layout_version, size)
            self._table = packed_files.read_table(handle, self._head)
            self._check_places()
            self._memory = _mapped(handle, size, mmap.PROT_READ)
        finally:
            os.close(handle)

    def check_model(self, files: Sequence[Path]) -> None:
        """Raises PackedFileError where it was made from other bytes than are in the files now."""
        if packed_files.identity(files)[0] == self._head.identity:
            return
        content = packed_files.content(files)
        if content.digest != self._head.content:
            raise PackedFileError("it was made from another model")
        # To be told at once next time. It is no harm where this cannot be written.
        with contextlib.suppress(OSError):
            handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(handle, replace(self._head, identity=content.known_as).encode(), 0)
            finally:
                os.close(handle)

    def check_data(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Raises PackedFileError where any of it is damaged."""
        regions = sorted(self._regions(), key=lambda region: -region.num_bytes)

        def is_sound(share: list[Region]) -> bool:
            start = self._memory.data_ptr()  # which holds on to the mapping until the last thread is done
            return all(checksum(start + each.offset, each.num_bytes) == each.checksum for each in share)

        if not all(pool.map(is_sound, [regions[first::threads] for first in range(threads)])):
            raise PackedFileError("its data is damaged")

    def get(self, name: str) -> Packed | None:
        entry = self._table.entries.get(name)
        if entry is None:
            return None
        inputs = None if entry.inputs is None else self._view(entry.inputs).view(torch.int32)
        return Packed(dict(entry.layout), self._view(entry.data), inputs)

    def _check_places(self) -> None:
        for region in self._regions():
            start, stop = region.offset, region.offset + region.num_bytes
            if start % ALIGNMENT or not HEAD_BYTES <= start <= stop <= self._head.table_offset:
                raise PackedFileError("its table names bytes that it has not")

    def _regions(self) -> list[Region]:
        entries = self._table.entries.values()
        return [region for entry in entries for region in (entry.data, entry.inputs) if region]

    def _view(self, region: Region) -> torch.Tensor:
        return self._memory[region.offset : region.offset + region.num_bytes]


class _Writer:
    """A file that is being filled; under its own name only once it is finished."""

    def __init__(self, place: Path, room: int) -> None:
        """Raises OSError where no file can be made."""
        self.place = place
        self._handle, self._path = packed_files.temporary(place)
        self._is_open = True
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._end = self._taken = HEAD_BYTES
        self._room = room
        try:
            os.ftruncate(self._handle, room)
            self._memory = _mapped(self._handle, room, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            self.discard()
            raise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Raises OSError where the disk is full."""
        with self._lock:
            if not self._is_open:
                raise OSError("given up")
            start = self._end
            end = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
            if end > self._room:
                raise OSError(f"more than the {self._room} bytes that were expected at most")
            if end > self._taken:
                taken = min(max(end, self._taken + _STEP_BYTES), self._room)
                os.posix_fallocate(self._handle, self._taken, taken - self._taken)
                self._taken = taken
            self._end = end
        return self._memory[start : start + num_bytes]

    def add(self, name: str, layout: dict[str, Any], data: torch.Tensor, inputs: torch.Tensor | None) -> None:
        """Raises OSError where the disk is full."""
        kept = None
        if inputs is not None:
            assert inputs.dtype == torch.int32
            copied = self.allocate(inputs.numel() * 4)
            copied.view(torch.int32).copy_(inputs)
            kept = self._region(copied)
        entry = Entry(layout, self._region(data), kept)
        with self._lock:
            self._entries[name] = entry

    def commit(self, model: str, layout_version: int, content: packed_files.Content) -> None:
        """Raises OSError where it cannot be finished."""
        table = msgspec.json.encode(Table(model, self._entries))
        size = self._end + len(table)
        crc = zlib.crc32(table)
        head = Head(
            layout_version, content.digest, content.known_as, size, self._end, len(table), crc
        ).encode()
        os.ftruncate(self._handle, size)
        for part, offset in ((table, self._end), (head, 0)):
            if os.pwrite(self._handle, part, offset) != len(part):
                raise OSError("the disk is full")
        os.rename(self._path, self.place)
        os.close(self._handle)
        self._is_open = False

    def discard(self) -> None:
        """Delete the file; the memory that was allocated stays usable."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                with contextlib.suppress(OSError):
                    self._path.unlink()
                os.close(self._handle)

    def _region(self, memory: torch.Tensor) -> Region:
        offset = memory.data_ptr() - self._memory.data_ptr()
        assert 0 <= offset < self._end, "data must come from allocate"
        num_bytes = memory.numel() * memory.element_size()
        return Region(offset, num_bytes, checksum(memory.data_ptr(), num_bytes))


def _note(error: Exception) -> str:
    return f"the repacked weights are not kept, so the next load takes as long as this one: {error}"


def _mapped(handle: int, num_bytes: int, protection: int) -> torch.Tensor:
    """A file in memory, uint8 [num_bytes], shared with whoever else maps it."""
    memory = mmap.mmap(handle, num_bytes, mmap.MAP_SHARED, protection)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    # Not `torch.frombuffer(memory)`: that warns of memory that cannot be written.
    view = (ctypes.c_uint8 * num_bytes).from_address(address)
    view.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(view, dtype=torch.uint8)
