"""What every kind of source shares: progress, the check for free space, and writing a verified file."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from appliance.model_files import files_of
from appliance.names import ModelError

CHUNK_BYTES = 1 << 20
# Left free beside what a pull writes: a disk that is full to the last byte hurts everything else on it.
SPARE_BYTES = 64 << 20


class PullError(ModelError):
    """A model could not be fetched; the message says why, and what to do."""


class DiskFullError(PullError):
    """The disk has no room for what is still to come; what was fetched so far is kept."""


class Readable(Protocol):
    """What can be read from, up to its end."""

    def read(self, size: int, /) -> bytes: ...


class Progress(Protocol):
    """Who is told how far a pull has come."""

    def tell(self, line: str) -> None:
        """Something to know before it goes on."""

    def begin(self, what: str, total: int) -> None:
        """A stage of `total` bytes starts; it ends where the next one starts."""

    def at(self, done: int) -> None:
        """So many bytes of the stage are done."""


class SilentProgress:
    """Tells nobody."""

    def tell(self, line: str) -> None:
        pass

    def begin(self, what: str, total: int) -> None:
        pass

    def at(self, done: int) -> None:
        pass


def require_space(folder: Path, nbytes: int) -> None:
    """Check, before anything is fetched, that `nbytes` more fit where `folder` is (or will be made).

    Raises:
        DiskFullError: they don't; with both numbers.
    """
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if nbytes + SPARE_BYTES > free:
        raise DiskFullError(
            f"not enough room in {folder}: {human_bytes(nbytes + SPARE_BYTES)} are needed, "
            f"{human_bytes(free)} are free; free some or choose another folder with --download-dir"
        )


def write_verified(source: Readable, target: Path, size: int, sha256: str, progress: Progress) -> str:
    """Copy `source` to `target` by way of a partial file beside it, which becomes `target` once it is whole.

    Args:
        size: bytes expected.
        sha256: expected hash; "" where none is known.

    Returns:
        the hash of what was written.

    Raises:
        PullError: another size or hash. Nothing is left at `target` then, nor beside it.
        DiskFullError: the same, but the source is not to blame.
    """
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    done = 0
    try:
        with partial.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.at(done)
            out.flush()
            os.fsync(out.fileno())
        _verify(target, done, size, digest.hexdigest(), sha256)
        partial.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = f"the disk of {target} is full; free {human_bytes(size)} and pull again"
            raise DiskFullError(full) from None
        raise
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def sha256_of(source: IO[bytes]) -> str:
    """The hash of everything that is left to read, in hexadecimal."""
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def sha256_of_all(hashes: Mapping[str, str]) -> str:
    """The hash of a model from those of its files, by name: a file's own, or that of a folder's list of them."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    listing = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(listing.encode()).hexdigest()


def sha256_of_model(path: Path) -> str:
    """The hash of a model's file or folder, as `sha256_of_all`."""
    hashes = {}
    for file in files_of(path):
        with file.open("rb") as source:
            hashes[file.name] = sha256_of(source)
    return sha256_of_all(hashes)


def _verify(target: Path, found_size: int, size: int, found_sha256: str, sha256: str) -> None:
    if found_size != size:
        raise PullError(f"{target.name} came with {found_size} bytes, expected {size}; it was thrown away")
    if sha256 and found_sha256 != sha256:
        raise PullError(
            f"{target.name} came with sha256 {found_sha256}, expected {sha256}; it was thrown away. "
            "Pull again; if it stays so, the source no longer has the file that the catalogue means"
        )


def human_bytes(nbytes: int) -> str:
    """A number of bytes for people."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
