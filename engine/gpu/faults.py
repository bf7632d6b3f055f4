"""Why a GPU cannot be used, in one line: pure functions. Imports no torch.

The texts that are recognised are those of torch, CUDA, Triton and the C compiler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.engine.backends import NO_GPU, GpuFault

# Asynchronous copies, bfloat16 and its tensor cores.
NEEDED_CAPABILITY = (8, 0)
_LONGEST_QUOTE = 160


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU as torch sees it, numbered by CUDA_VISIBLE_DEVICES."""

    name: str
    capability: tuple[int, int]

    @property
    def is_able(self) -> bool:
        return self.capability >= NEEDED_CAPABILITY


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What is known of GPUs, and of what Triton needs, before one is used.

    Attributes:
        present: whether an NVIDIA GPU is plugged in.
        cuda: version that torch was built for, "" for none.
        error: what CUDA said when it was started, "" where it did start.
        hidden: CUDA_VISIBLE_DEVICES, None where it is not set.
        compiler: the C compiler that Triton would call, "" for none.
    """

    present: bool
    torch: str
    cuda: str
    gpus: tuple[VisibleGpu, ...] = ()
    error: str = ""
    hidden: str | None = None
    has_triton: bool = True
    compiler: str = ""


def choose_gpu(facts: GpuFacts, device: str) -> int | GpuFault:
    """The number of the GPU that `device` ("auto", "cuda" or "cuda:N") means, if nothing known speaks against it."""
    present = facts.present or bool(facts.gpus)
    if not present and not facts.error:
        return NO_GPU
    index = _index(facts, device)
    line = _line(facts, index)
    return GpuFault(line, present) if line else index


def _index(facts: GpuFacts, device: str) -> int:
    _, _, number = device.partition(":")
    if number:
        return int(number)
    return next((index for index, gpu in enumerate(facts.gpus) if gpu.is_able), 0)


def _line(facts: GpuFacts, index: int) -> str:
    """What speaks against it, "" for nothing."""
    if not facts.cuda:
        return (
            f"torch {facts.torch} is built without CUDA, which the NVIDIA GPU needs; install the build for CUDA, "
            "see https://pytorch.org/get-started/locally"
        )
    if "No CUDA GPUs are available" in facts.error or not (facts.error or facts.gpus):
        return _hidden(facts.hidden)
    if facts.error:
        return explain(facts.error, facts.cuda)
    if index >= len(facts.gpus):
        there = ", ".join(f"cuda:{number} {gpu.name}" for number, gpu in enumerate(facts.gpus))
        return f"there is no cuda:{index}; choose one of those that are visible: {there}"
    gpu = facts.gpus[index]
    if not gpu.is_able:
        found, needed = (".".join(map(str, pair)) for pair in (gpu.capability, NEEDED_CAPABILITY))
        return f"{gpu.name}: compute capability {found}, {needed} is needed"
    if not facts.has_triton:
        return "Triton is not installed, which compiles the GPU's kernels; install it: pip install triton"
    if not facts.compiler:
        return _NO_COMPILER
    return ""


def _hidden(value: str | None) -> str:
    if value is None:
        return "CUDA finds no GPU; in a container, pass one through (docker run --gpus all), else reinstall the driver"
    return f"CUDA_VISIBLE_DEVICES is {value!r}, which leaves no GPU; unset it, or name a GPU that `nvidia-smi -L` lists"


_NO_COMPILER = "no C compiler is found, which Triton needs; install gcc, or name one in CC"
_NO_LIBCUDA = (
    "Triton finds no libcuda.so.1, which the NVIDIA driver brings; run ldconfig as root, or set "
    "TRITON_LIBCUDA_PATH to its folder"
)

# What is found in a message, and the line for it, in which {0} is the first group.
_KNOWN = (
    (
        r"driver version is insufficient for CUDA runtime",
        "the NVIDIA driver is too old for CUDA {cuda}, which torch is built for; update it",
    ),
    (
        r"Found no NVIDIA driver",
        "no NVIDIA driver is loaded; install it, or in a container pass the GPU through (docker run --gpus all)",
    ),
    (
        r"unsupported display driver / cuda driver combination",
        "the NVIDIA driver's kernel module and its libraries are of different versions; reboot",
    ),
    (
        r"forward compatibility was attempted",
        "CUDA's compatibility libraries are in use, which this GPU does not take; remove their folder from "
        "LD_LIBRARY_PATH, or update the NVIDIA driver for CUDA {cuda}",
    ),
    (
        r"system not yet initialized",
        "the GPUs' switches are not ready; start the service nvidia-fabricmanager",
    ),
    (
        r"CUDA unknown error|CUDA driver initialization failed|Error 999",
        "the NVIDIA driver does not answer; reload its module nvidia_uvm, or reboot",
    ),
    (
        r"busy or unavailable",
        "the GPU lets no other process in; end the one that holds it, or set its compute mode: nvidia-smi -c DEFAULT",
    ),
    (r"out of memory", "the GPU has no memory left to start with; end what holds it, see nvidia-smi"),
    (
        r"no kernel image is available",
        "torch for CUDA {cuda} has no kernels for this GPU; install a build that has them",
    ),
    (r"Failed to find C compiler|No such file or directory: '(?:gcc|clang|cc)'", _NO_COMPILER),
    (
        r" Python\.h: |'Python\.h' file not found",
        "Python.h is missing, which Triton needs; install Python's headers: python3-dev, or python3-devel on Fedora",
    ),
    (
        r":\d+:\d+: [^:\n]+: (\S+\.h): |error: '(\S+\.h)' file not found",
        "the C compiler finds no {0}, which Triton needs; install the C library's headers: libc6-dev, or glibc-devel",
    ),
    (
        r"cannot find -l:?(?:lib)?cuda|libcuda\.so cannot found|libcuda\.so\.1: cannot open|ldconfig",
        _NO_LIBCUDA,
    ),
    (
        r"failed to map segment from shared object",
        "Triton's cache is on a file system without the right to execute (noexec); set TRITON_CACHE_DIR to another",
    ),
    (
        r"\[Errno \d+\] ((?:Permission denied|Read-only file system|No space left on device|Not a directory)[^\n]*)",
        "Triton cannot keep what it compiles: {0}; make that place writable, or set TRITON_CACHE_DIR to another",
    ),
    (
        r"unsupported toolchain|device kernel image is invalid|undefined symbol: cu[A-Z]",
        "the NVIDIA driver is too old for Triton; update it",
    ),
)


def explain(message: str, cuda: str) -> str:
    """One line for what torch, Triton or a compiler says when something fails.

    Args:
        cuda: version that torch was built for.
    """
    too_old = re.search(r"driver on your system is too old \(found version (\d+)\)", message)
    if too_old:
        version = int(too_old[1])
        has = f"{version // 1000}.{version % 1000 // 10}"
        return (
            f"the NVIDIA driver is for CUDA {has}, torch for CUDA {cuda}; update the driver, or install torch for CUDA "
            f"{has} or older"
        )
    for pattern, line in _KNOWN:
        found = re.search(pattern, message)
        if found:
            return line.format(next(filter(None, found.groups()), ""), cuda=cuda)
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no message"]
    said = next((line for line in lines if re.search("error|cannot|fatal", line)), lines[0])
    short = said if len(said) <= _LONGEST_QUOTE else f"{said[:_LONGEST_QUOTE]}…"
    return f"a first kernel failed: {short}; to do without the GPU, set device to cpu"
