"""The start-up check: whether there is a GPU that runs our kernels, and if not, why."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from appliance.engine.backends import NO_GPU, GpuFault, wants_gpu
from appliance.engine.config import EngineConfig
from appliance.engine.gpu.faults import GpuFacts, VisibleGpu, choose_gpu, explain

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"
log = logging.getLogger("appliance.engine")


def find_gpu(config: EngineConfig) -> torch.device | GpuFault:
    """The GPU to compute on, which becomes this thread's current one; or why there is none.

    Triton's interpreter, where it is on, stands for a GPU if `config.backend` asks for one: it runs on the CPU.
    Takes a second or two where a GPU is there, as it compiles and runs a kernel.
    """
    if not wants_gpu(config):
        return NO_GPU
    if is_interpreted():
        if config.backend == "gpu":
            return torch.device("cpu")
        return GpuFault("Triton's interpreter is on; set backend to gpu to compute with it", present=False)
    facts = gather_facts()
    index = choose_gpu(facts, config.device)
    if isinstance(index, GpuFault):
        return index
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    failure = attempt(lambda: _run_a_kernel(device))
    return GpuFault(f"{facts.gpus[index].name}: {explain(failure, facts.cuda)}", True) if failure else device


def gpu_name(device: torch.device) -> str:
    """What people call it."""
    return "Triton's interpreter" if device.type == "cpu" else torch.cuda.get_device_name(device)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    if "TRITON_INTERPRET" not in os.environ or not _has_triton():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def gather_facts(root: Path = Path("/")) -> GpuFacts:
    """What torch and the machine say, without using a GPU.

    Args:
        root: where proc and sys are mounted.
    """
    cuda, error, gpus = torch.version.cuda or "", "", []
    if cuda:
        try:
            # It warns of GPUs that this torch has no kernels for; so do we, in a line.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.cuda.init()  # type: ignore[no-untyped-call]
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                gpus.append(VisibleGpu(properties.name, (properties.major, properties.minor)))
        except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as failure:
            error = str(failure)
    return GpuFacts(
        present=_is_plugged_in(root),
        torch=torch.__version__,
        cuda=cuda,
        gpus=tuple(gpus),
        error=error,
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
        has_triton=_has_triton(),
        compiler=_compiler(),
    )


def attempt(action: Callable[[], None]) -> str:
    """What goes wrong with an action, in its own words and those of the compilers that it calls; "" if nothing does."""
    failure: Exception | None = None
    with tempfile.TemporaryFile() as said:
        with _standard_error_to(said.fileno()):
            try:
                action()
            # Triton, the compilers and the driver fail in many ways, and each of them means: not on this GPU.
            except Exception as error:
                failure = error
        said.seek(0)
        output = said.read().decode(errors="replace")
    if failure is None:
        return ""
    log.debug("the GPU's first kernel failed", exc_info=failure)
    if isinstance(failure, subprocess.CalledProcessError):
        return f"{failure.cmd[0]} ended with status {failure.returncode}\n{output}"
    return f"{failure or type(failure).__name__}\n{output}"


@contextmanager
def _standard_error_to(file: int) -> Iterator[None]:
    """Also of processes that are started; one that is closed stays so."""
    try:
        stderr = os.dup(2)
    except OSError:
        yield
        return
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _run_a_kernel(device: torch.device) -> None:
    """Looks rows up in a small table and rounds them to bfloat16, as the first operation of a model does."""
    from appliance.kernels.embedding.gpu import embed

    table = torch.arange(256.0, device=device).view(2, 128)
    out = torch.empty(2, 128, dtype=torch.bfloat16, device=device)
    embed(out, torch.tensor([1, 0], device=device), table, 0.5)
    if not torch.equal(out.cpu(), (torch.arange(256.0).view(2, 128).flip(0) / 2).bfloat16()):
        raise RuntimeError("it computes wrong numbers; update the NVIDIA driver, and check the GPU's memory")


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _compiler() -> str:
    """As Triton looks for it."""
    named = os.environ.get("CC")
    candidates = ("gcc", "clang") if named is None else (named,)
    return next(filter(None, map(shutil.which, candidates)), "")


def _is_plugged_in(root: Path) -> bool:
    """Whether an NVIDIA GPU is among the PCI devices, or its driver is loaded."""
    if (root / "proc/driver/nvidia/version").exists():
        return True
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor.startswith(_NVIDIA) and kind.startswith(_DISPLAY_CLASS):
            return True
    return False
