"""How many cores a process may use, read from real trees of files as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.engine import machine
from appliance.engine.machine import usable_cpus

HYBRID = "3:cpuset:/\n2:cpu,cpuacct:/docker/a\n1:name=systemd:/\n0::/docker/a\n"


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def tree(root: Path, own: str, files: dict[str, str]) -> Path:
    """A root with the given /proc/self/cgroup, and files below /sys/fs/cgroup."""
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "9900000 100000\n"}, 8),
        # The narrowest of the groups around it.
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "300000 100000\n"}, 1),
        ("0::/a/b\n", {"other/cpu.max": "100000 100000\n"}, 8),
        # A container that sees its own group as the root.
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/../../elsewhere\n", {"cpu.max": "400000 100000\n"}, 4),
        ("2:cpu,cpuacct:/docker/a\n", {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n"}, 8),
        (HYBRID, {"unified/docker/a/cpu.max": "200000 100000\n"}, 2),
        ("", {"cpu.max": "100000 100000\n"}, 8),
        ("nonsense\n\n0:\n", {}, 8),
        ("0::/\n", {"cpu.max": ""}, 8),
        ("0::/\n", {"cpu.max": "many few\n"}, 8),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 8),
        ("0::/\n", {"cpu.max": "-5 100000\n"}, 8),
    ],
)
def test_version_2(own: str, files: dict[str, str], cpus: int, tmp_path: Path) -> None:
    assert usable_cpus(tree(tmp_path, own, files)) == cpus


@pytest.mark.parametrize(
    ("own", "group", "quota", "period", "cpus"),
    [
        ("4:cpu,cpuacct:/docker/a\n", "cpu,cpuacct/docker/a", "150000", "100000", 2),
        ("4:cpuacct,cpu:/docker/a\n", "cpu/docker/a", "150000", "50000", 3),
        ("4:cpu:/docker/a\n", "cpu/docker", "500000", "100000", 5),
        # Mounted from its own group on, as in a container.
        ("4:cpu:/docker/a\n", "cpu", "10000", "100000", 1),
        ("4:cpu:/docker/a\n", "cpu/docker/a", "-1", "100000", 8),
        ("4:cpu:/docker/a\n", "cpu/docker/a", "x", "100000", 8),
        ("4:cpuset:/docker/a\n", "cpu/docker/a", "100000", "100000", 8),
        (HYBRID, "cpu,cpuacct/docker/a", "300000", "100000", 3),
    ],
)
def test_version_1(own: str, group: str, quota: str, period: str, cpus: int, tmp_path: Path) -> None:
    files = {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": f"{period}\n"}
    assert usable_cpus(tree(tmp_path, own, files)) == cpus


def test_without_any_of_the_files_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 8


def test_memory_is_what_the_narrowest_group_leaves(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "50\n",
        "a/memory.max": "1000\n",
        "a/memory.current": "400\n",
    }
    assert machine._cgroup_left(tree(tmp_path, "0::/a/b\n", files)) == 600
