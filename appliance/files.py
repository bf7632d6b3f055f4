"""What every file needs that several processes change, or that must outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def open_lock(path: Path, mode: int) -> int:
    """A descriptor of a file to lock, which is made with `mode` where it is not there; its folders too.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def sync(path: Path) -> None:
    """Have a file, or which files are in a folder, written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
