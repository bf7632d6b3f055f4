"""What this process may use of the machine. Imports no torch."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUP = Path("sys/fs/cgroup")


def usable_cpus(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those it may run on, and no more than its control groups grant it time of.

    Half a core of quota counts as one core, two and a half as three.

    Args:
        root: where proc and sys are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cpu_quotas(root)]
    return max(1, min([cores, *quotas]))


def available_memory() -> int:
    """Bytes that can be allocated: what the machine has free, and no more than the control group leaves."""
    free = int(psutil.virtual_memory().available)
    left = _cgroup_left()
    return free if left is None else min(free, left)


def _cgroup_left(root: Path = Path("/")) -> int | None:
    """Bytes up to the nearest limit of the control groups (version 2) above this process; None without one."""
    lefts = []
    for _, groups in _cgroups(root, "memory"):
        for group in groups:
            try:
                limit = (group / "memory.max").read_text().strip()
                used = int((group / "memory.current").read_text()) - _file_pages(group)
            except (OSError, ValueError):
                continue
            if limit.isdigit():
                lefts.append(max(0, int(limit) - used))
    return min(lefts, default=None)


def _file_pages(group: Path) -> int:
    """Bytes of files that a control group counts as used but gives back when asked; 0 where it says none."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = (line.split() for line in lines if line.startswith(("inactive_file ", "active_file ")))
    return sum(int(count) for _, count in counts)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The quota of each control group around this process that has one, in cores."""
    for version, groups in _cgroups(root, "cpu"):
        for group in groups:
            try:
                if version == 2:
                    quota, period = (group / "cpu.max").read_text().split()
                else:
                    quota = (group / "cpu.cfs_quota_us").read_text()
                    period = (group / "cpu.cfs_period_us").read_text()
                cores = int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):  # none there, or "max"
                continue
            if cores > 0:  # version 1 writes -1 for none
                yield cores


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, list[Path]]]:
    """For each hierarchy that may limit `controller`: its version, and the groups of this process, innermost first.

    In a container the groups outside may be named but not be mounted: some of these folders need not be there.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if not controllers:
            version, names = 2, [".", "unified"]
        elif controller in controllers.split(","):
            version, names = 1, sorted({controllers, controller})
        else:
            continue
        for name in names:
            mount = root / _CGROUP / name
            folder = mount / own.strip("/")
            yield version, [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]


def trim_memory() -> None:
    """Give the memory of freed objects back to the system, where the C library keeps it and can be told to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
