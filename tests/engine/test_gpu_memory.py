"""Who is on a GPU, as NVML's own structures tell it, and what is said of its memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from appliance.engine.gpu.memory import (
    DeviceMemory,
    GpuProcess,
    device_memory,
    list_others,
    measure_peak,
    other_processes,
)
from appliance.engine.memory import GPU_MEMORY, MAIN_MEMORY

UUID = "b1946ac9-2492-d234-7c6e-1b2a3c4d5e6f"
GIB = 2**30
XORG = GpuProcess(1200, "Xorg", 4 * GIB // 10)
PYTHON = GpuProcess(3311, "python", 198 * GIB // 10)

# What a driver's library exports, as nvml.h declares it.
LIBRARY = """
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
static int list(unsigned *count, process *out, const process *all, unsigned n) {
    if (*count < n) { *count = n; return INSUFFICIENT_SIZE; }
    *count = n;
    memcpy(out, all, n * sizeof *all);
    return SUCCESS;
}
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "no such thing"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = (void *)1;
    return strcmp(uuid, "%(known)s") ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *out) {
    static const process all[] = {{%(parent)d, 5ull << 30, -1, -1}, {%(own)d, 7ull << 30, -1, -1},
                                  {4194303, 1ull << 30, -1, -1}, {4194302, -1ull, -1, -1}};
    return list(count, out, all, 4);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, process *out) {
    static const process all[] = {{%(parent)d, 5ull << 30, -1, -1}, {4194301, 3ull << 20, -1, -1}};
    return list(count, out, all, 2);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *count, process *out) { return NOT_SUPPORTED; }
"""


def load(folder: Path, known: str) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    own = psutil.Process()
    (folder / "nvml.c").write_text(LIBRARY % {"known": known, "parent": own.ppid(), "own": own.pid})
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_others_are_read_from_the_drivers_structures(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlLib", load(tmp_path, f"{kind}-{UUID}"))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    parent = psutil.Process().parent()
    assert parent is not None
    # Ids so high are given to no process; those of containers can be such that are not seen here.
    assert other_processes(UUID) == (
        GpuProcess(parent.pid, parent.name(), 5 * GIB),
        GpuProcess(4194303, "", 1 * GIB),
        GpuProcess(4194302, "", None),
        GpuProcess(4194301, "", 3 * 2**20),
    )
    assert other_processes("another") == ()


def test_a_machine_without_the_drivers_library_has_nobody() -> None:
    pytest.importorskip("pynvml")
    assert other_processes(UUID) == ()


class FailingNvml(SimpleNamespace):
    """What pynvml has, of which one function fails."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, failing: str) -> None:
        self.is_open = False
        self._failing = failing
        found = [SimpleNamespace(pid=4194303, usedGpuMemory=GIB)]
        super().__init__(
            nvmlInit=self._function("nvmlInit", lambda: setattr(self, "is_open", True)),
            nvmlShutdown=lambda: setattr(self, "is_open", False),
            nvmlDeviceGetHandleByUUID=self._function("nvmlDeviceGetHandleByUUID", lambda _: 1),
            **{
                f"nvmlDeviceGet{kind}RunningProcesses_v3": self._function(kind, lambda _: found)
                for kind in ("Compute", "Graphics", "MPSCompute")
            },
        )

    def _function(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == self._failing:
                raise self.NVMLError("not supported")
            return answer(*arguments)

        return call


@pytest.mark.parametrize(
    ("failing", "seen"),
    [("", 1), ("nvmlInit", 0), ("nvmlDeviceGetHandleByUUID", 0), ("Compute", 1), ("Graphics", 1)],
)
def test_what_nvml_cannot_do_is_left_out_and_it_is_closed(failing: str, seen: int) -> None:
    nvml: Any = FailingNvml(failing)
    assert list_others(nvml, UUID) == (GpuProcess(4194303, "", GIB),) * seen
    assert not nvml.is_open


def test_memory_is_described_with_those_who_hold_it_largest_first() -> None:
    memory = DeviceMemory(GPU_MEMORY, 24 * GIB, 31 * GIB // 10, (XORG, PYTHON))
    named = "python (pid 3311) 19.8 GiB, Xorg (pid 1200) 0.4 GiB"
    assert memory.describe() == f"the GPU has 24.0 GiB, 3.1 GiB free: {named}"
    assert memory.note() == f"other programs hold 20.2 GiB of the GPU's 24.0 GiB: {named}"


def test_a_desktop_alone_is_not_worth_a_note() -> None:
    memory = DeviceMemory(GPU_MEMORY, 24 * GIB, 23 * GIB, (XORG, GpuProcess(7, "", None)))
    assert memory.note() == ""
    assert memory.describe() == "the GPU has 24.0 GiB, 23.0 GiB free: Xorg (pid 1200) 0.4 GiB, pid 7"
    assert DeviceMemory(GPU_MEMORY, 24 * GIB, 23 * GIB).describe() == "the GPU has 24.0 GiB, 23.0 GiB free"


def test_of_many_the_largest_are_named() -> None:
    many = tuple(GpuProcess(pid, "", pid * GIB) for pid in range(1, 8))
    described = DeviceMemory(GPU_MEMORY, 80 * GIB, GIB, many).describe()
    assert described.endswith(
        ": pid 7 7.0 GiB, pid 6 6.0 GiB, pid 5 5.0 GiB, pid 4 4.0 GiB, pid 3 3.0 GiB and 2 more"
    )


def test_in_a_gpus_place_the_interpreter_has_main_memory() -> None:
    memory = device_memory(torch.device("cpu"))
    assert memory.kind is MAIN_MEMORY
    assert 0 < memory.free_bytes <= memory.total_bytes == psutil.virtual_memory().total
    assert (memory.describe(), memory.note()) == ("", "")
    calls: list[int] = []
    assert measure_peak(torch.device("cpu"), lambda: calls.append(1)) == 0
    assert calls == [1]
