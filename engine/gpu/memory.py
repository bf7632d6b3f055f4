"""What of a GPU's memory is free, who else holds some, and how much a step needs for itself."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from appliance.engine.machine import available_memory
from appliance.engine.memory import GPU_MEMORY, MAIN_MEMORY, MemoryKind

# So many of the others are named, and all of them are worth a note from this share of the memory on.
_NAMED = 5
_NOTABLE_SHARE = 0.1
log = logging.getLogger("appliance.engine")


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """Another process on the GPU.

    Attributes:
        name: "" where it cannot be seen, e.g. from a container.
        used_bytes: of the GPU's memory, None where the driver does not say.
    """

    pid: int
    name: str
    used_bytes: int | None

    def __str__(self) -> str:
        who = f"{self.name} (pid {self.pid})" if self.name else f"pid {self.pid}"
        return who if self.used_bytes is None else f"{who} {_gib(self.used_bytes)}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of the device that computes.

    Attributes:
        kind: main memory, where Triton's interpreter stands for a GPU.
        free_bytes: what this process can still take.
        others: who else is on the GPU, as far as the driver tells.
    """

    kind: MemoryKind
    total_bytes: int
    free_bytes: int
    others: tuple[GpuProcess, ...] = ()

    def describe(self) -> str:
        """What there is and who holds it, for a message; "" of main memory."""
        if self.kind is MAIN_MEMORY:
            return ""
        size = f"the GPU has {_gib(self.total_bytes)}, {_gib(self.free_bytes)} free"
        return f"{size}: {self._named()}" if self.others else size

    def note(self) -> str:
        """Who else holds much of it, "" where nobody does."""
        used = sum(process.used_bytes or 0 for process in self.others)
        if used < _NOTABLE_SHARE * self.total_bytes:
            return ""
        return f"other programs hold {_gib(used)} of the GPU's {_gib(self.total_bytes)}: {self._named()}"

    def _named(self) -> str:
        by_size = sorted(self.others, key=lambda process: process.used_bytes or 0, reverse=True)
        more = f" and {len(by_size) - _NAMED} more" if len(by_size) > _NAMED else ""
        return ", ".join(map(str, by_size[:_NAMED])) + more


def device_memory(device: torch.device) -> DeviceMemory:
    """What there is now; what torch holds unused is given back to the device first."""
    if device.type != "cuda":
        return DeviceMemory(MAIN_MEMORY, int(psutil.virtual_memory().total), available_memory())
    _give_back(device)
    free, total = torch.cuda.mem_get_info(device)
    others = other_processes(str(torch.cuda.get_device_properties(device).uuid))
    return DeviceMemory(GPU_MEMORY, total, free, others)


def measure_peak(device: torch.device, run: Callable[[], None]) -> int:
    """The most bytes that `run` holds at a time beyond what is held now; 0 without a GPU.

    On a GPU it is run twice: the first time, kernels are loaded and tuned, which takes memory that later runs do not.
    Ask `device_memory` afterwards: what the first run took for good is then no longer free.
    """
    run()
    if device.type != "cuda":
        return 0
    _give_back(device)
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - held


def _give_back(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def other_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Who else is on a GPU, or on a part of one (MIG); nobody where NVML is not there or fails.

    Args:
        uuid: the GPU's. Its number would not do: CUDA_VISIBLE_DEVICES and CUDA's own order change that.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    return list_others(pynvml, uuid)


def list_others(nvml: Any, uuid: str) -> tuple[GpuProcess, ...]:
    """As `other_processes`, asking `nvml`, which is pynvml."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("NVML cannot be used: %s", error)
        return ()
    try:
        used = _used_bytes(nvml, uuid)
    except nvml.NVMLError as error:
        log.debug("NVML does not know the GPU %s: %s", uuid, error)
        return ()
    finally:
        nvml.nvmlShutdown()
    return tuple(GpuProcess(pid, _name(pid), size) for pid, size in used.items() if pid != os.getpid())


def _used_bytes(nvml: Any, uuid: str) -> dict[int, int | None]:
    """The bytes of each process, by its id. One that computes and draws is in two lists, with all of its bytes."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    used: dict[int, int | None] = {}
    for list_processes in (
        nvml.nvmlDeviceGetComputeRunningProcesses_v3,
        nvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
    ):
        try:
            found = list_processes(handle)
        except nvml.NVMLError as error:
            log.debug("NVML cannot list processes: %s", error)
            continue
        for process in found:
            sizes = [size for size in (used.get(process.pid), process.usedGpuMemory) if size is not None]
            used[process.pid] = max(sizes, default=None)
    return used


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
