"""Why a GPU cannot be used: the line for each fact, and for what torch, Triton and compilers really say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engine.backends import NO_GPU, GpuFault
from appliance.engine.gpu.check import attempt
from appliance.engine.gpu.faults import GpuFacts, VisibleGpu, choose_gpu, explain

TURING = VisibleGpu("NVIDIA GeForce RTX 2080", (7, 5))
AMPERE = VisibleGpu("NVIDIA GeForce RTX 3090", (8, 6))
ADA = VisibleGpu("NVIDIA GeForce RTX 4090", (8, 9))
GOOD = GpuFacts(
    present=True, torch="2.13.0+cu130", cuda="13.0", gpus=(AMPERE,), has_triton=True, compiler="/usr/bin/gcc"
)


@pytest.mark.parametrize(
    ("gpus", "device", "index"),
    [
        ((AMPERE,), "auto", 0),
        ((AMPERE, ADA), "cuda", 0),
        ((AMPERE, ADA), "cuda:1", 1),
        ((TURING, ADA), "auto", 1),
        ((VisibleGpu("NVIDIA A100", (8, 0)),), "auto", 0),
        ((VisibleGpu("NVIDIA GeForce RTX 5090", (12, 0)),), "auto", 0),
    ],
)
def test_a_gpu_against_which_nothing_speaks(gpus: tuple[VisibleGpu, ...], device: str, index: int) -> None:
    assert choose_gpu(replace(GOOD, gpus=gpus), device) == index
    # As in a subsystem without PCI devices.
    assert choose_gpu(replace(GOOD, gpus=gpus, present=False), device) == index


@pytest.mark.parametrize(
    ("facts", "device", "line"),
    [
        (
            replace(GOOD, torch="2.13.0+cpu", cuda="", gpus=()),
            "auto",
            "torch 2.13.0+cpu is built without CUDA, which the NVIDIA GPU needs; install the build for CUDA, see "
            "https://pytorch.org/get-started/locally",
        ),
        (
            replace(GOOD, gpus=(TURING,)),
            "auto",
            "NVIDIA GeForce RTX 2080: compute capability 7.5, 8.0 is needed",
        ),
        (
            replace(GOOD, gpus=(TURING, ADA)),
            "cuda:0",
            "NVIDIA GeForce RTX 2080: compute capability 7.5, 8.0 is needed",
        ),
        (
            replace(GOOD, gpus=(AMPERE, ADA)),
            "cuda:2",
            "there is no cuda:2; choose one of those that are visible: cuda:0 NVIDIA GeForce RTX 3090, "
            "cuda:1 NVIDIA GeForce RTX 4090",
        ),
        (
            replace(GOOD, gpus=(), error="No CUDA GPUs are available", hidden="7"),
            "auto",
            "CUDA_VISIBLE_DEVICES is '7', which leaves no GPU; unset it, or name a GPU that `nvidia-smi -L` lists",
        ),
        (
            replace(GOOD, gpus=(), error="No CUDA GPUs are available"),
            "auto",
            "CUDA finds no GPU; in a container, pass one through (docker run --gpus all), else reinstall the driver",
        ),
        (
            replace(GOOD, has_triton=False),
            "auto",
            "Triton is not installed, which compiles the GPU's kernels; install it: pip install triton",
        ),
        (
            replace(GOOD, compiler=""),
            "auto",
            "no C compiler is found, which Triton needs; install gcc, or name one in CC",
        ),
    ],
)
def test_each_fact_that_speaks_against_it_has_its_line(facts: GpuFacts, device: str, line: str) -> None:
    assert choose_gpu(facts, device) == GpuFault(line, present=True)


def test_a_machine_without_a_gpu() -> None:
    bare = GpuFacts(present=False, torch="2.13.0+cpu", cuda="")
    assert choose_gpu(bare, "auto") is NO_GPU
    with_cuda = replace(bare, torch="2.13.0+cu130", cuda="13.0", error=NO_DRIVER)
    fault = choose_gpu(with_cuda, "auto")
    assert isinstance(fault, GpuFault)
    assert not fault.present
    assert fault.line.startswith("no NVIDIA driver is loaded; install it")


NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
COUNTING = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
    "that might have already set an error? Error "
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
GERMAN_GCC = (
    "/usr/bin/gcc ended with status 1\n/tmp/tmps1rkq3y3/main.c:5:10: schwerwiegender Fehler: Python.h: Datei oder "
    "Verzeichnis nicht gefunden\n    5 | #include <Python.h>\n"
)
NO_LIBC_HEADERS = (
    "/usr/bin/gcc ended with status 1\nIn file included from /usr/include/python3.11/Python.h:12,\n"
    "                 from /tmp/tmps1rkq3y3/cuda_utils.c:9:\n"
    "/usr/include/python3.11/pyconfig.h:3:12: fatal error: limits.h: No such file or directory\n"
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            TOO_OLD,
            "the NVIDIA driver is for CUDA 12.4, torch for CUDA 13.0; update the driver, or install torch for CUDA "
            "12.4 or older",
        ),
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            "the NVIDIA driver is too old for CUDA 13.0, which torch is built for; update it",
        ),
        (
            COUNTING + "803: system has unsupported display driver / cuda driver combination",
            "the NVIDIA driver's kernel module and its libraries are of different versions; reboot",
        ),
        (
            COUNTING + "804: forward compatibility was attempted on non supported HW",
            "CUDA's compatibility libraries are in use, which this GPU does not take; remove their folder from "
            "LD_LIBRARY_PATH, or update the NVIDIA driver for CUDA 13.0",
        ),
        (
            COUNTING + "802: system not yet initialized",
            "the GPUs' switches are not ready; start the service nvidia-fabricmanager",
        ),
        (UNKNOWN, "the NVIDIA driver does not answer; reload its module nvidia_uvm, or reboot"),
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable" + ASYNCHRONOUS,
            "the GPU lets no other process in; end the one that holds it, or set its compute mode: "
            "nvidia-smi -c DEFAULT",
        ),
        (
            "CUDA error: no kernel image is available for execution on the device" + ASYNCHRONOUS,
            "torch for CUDA 13.0 has no kernels for this GPU; install a build that has them",
        ),
        (
            "CUDA error: out of memory" + ASYNCHRONOUS,
            "the GPU has no memory left to start with; end what holds it, see nvidia-smi",
        ),
        (
            "Triton Error [CUDA]: device kernel image is invalid",
            "the NVIDIA driver is too old for Triton; update it",
        ),
        (
            "[Errno 13] Permission denied: '/app/.triton'\n",
            "Triton cannot keep what it compiles: Permission denied: '/app/.triton'; make that place writable, or set "
            "TRITON_CACHE_DIR to another",
        ),
        (
            "/tmp/cache/cuda_utils.so: failed to map segment from shared object",
            "Triton's cache is on a file system without the right to execute (noexec); set TRITON_CACHE_DIR to another",
        ),
        (
            "libcuda.so.1: cannot open shared object file: No such file or directory",
            "Triton finds no libcuda.so.1, which the NVIDIA driver brings; run ldconfig as root, or set "
            "TRITON_LIBCUDA_PATH to its folder",
        ),
        (
            GERMAN_GCC,
            "Python.h is missing, which Triton needs; install Python's headers: python3-dev, or python3-devel on "
            "Fedora",
        ),
        (
            NO_LIBC_HEADERS,
            "the C compiler finds no limits.h, which Triton needs; install the C library's headers: libc6-dev, or "
            "glibc-devel",
        ),
        (
            "/usr/bin/gcc ended with status 1\n/usr/bin/ld: cannot find crti.o: No such file or directory\n",
            "a first kernel failed: /usr/bin/ld: cannot find crti.o: No such file or directory; to do without the GPU, "
            "set device to cpu",
        ),
        (
            "CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS,
            "a first kernel failed: CUDA error: an illegal memory access was encountered; to do without the GPU, set "
            "device to cpu",
        ),
    ],
)
def test_what_is_said_becomes_a_line_with_what_to_do(message: str, line: str) -> None:
    assert explain(message, "13.0") == line


class Triton:
    """Triton's own build of what launches kernels, on a machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        pytest.importorskip("triton")
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed")
        source = folder / "empty.c"
        source.write_text("int cuInit(unsigned flags) { return 0; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))
        monkeypatch.delenv("CC", raising=False)

    def build(self) -> str:
        from triton.backends.nvidia import driver

        driver.libcuda_dirs.cache_clear()
        driver.library_dirs.cache_clear()
        return explain(attempt(driver.CudaUtils), "13.0")


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Triton:
    return Triton(monkeypatch, tmp_path)


def test_triton_without_a_compiler(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert triton.build().startswith("no C compiler is found")


def test_triton_without_the_headers_of_python(
    triton: Triton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = {**sysconfig.get_paths(), "include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: paths)
    assert triton.build().startswith("Python.h is missing")
    assert capfd.readouterr().err == ""


def test_triton_without_the_drivers_library(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/nowhere")
    assert triton.build().startswith("Triton finds no libcuda.so.1")
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.setattr(subprocess, "check_output", lambda _: b"libc.so.6 => /lib/libc.so.6\n")
    assert triton.build().startswith("Triton finds no libcuda.so.1")


def test_triton_with_a_drivers_library_that_is_too_old(triton: Triton) -> None:
    assert triton.build() == "the NVIDIA driver is too old for Triton; update it"


def test_triton_without_a_place_for_what_it_compiles(
    triton: Triton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert triton.build().startswith("Triton cannot keep what it compiles: Not a directory: ")


def test_what_goes_well_says_nothing_and_leaves_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert attempt(lambda: None) == ""
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
