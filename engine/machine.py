"""What this process may use of the machine. Imports no torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that can be allocated: what the machine has free, and no more than the control group leaves."""
    free = int(psutil.virtual_memory().available)
    left = _cgroup_left()
    return free if left is None else min(free, left)


def _cgroup_left() -> int | None:
    """Bytes up to the nearest limit of the control groups (version 2) above this process; None without one."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()[-1].partition("::")[2]
    except (OSError, IndexError):
        return None
    folder = _CGROUP / own.strip("/")
    lefts = []
    for group in (folder, *folder.parents):
        if not group.is_relative_to(_CGROUP):
            break
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            lefts.append(max(0, int(limit) - used))
    return min(lefts, default=None)


def trim_memory() -> None:
    """Give the memory of freed objects back to the system, where the C library keeps it and can be told to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
