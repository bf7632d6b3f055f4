"""The start-up check on a machine without a GPU: where it looks, and Triton's interpreter in a GPU's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from appliance.engine.backends import NO_GPU, GpuFault
from appliance.engine.config import EngineConfig
from appliance.engine.gpu.check import find_gpu, gather_facts


@pytest.mark.parametrize(
    ("files", "present"),
    [
        ({}, False),
        ({"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n"}, True),
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n", "sys/bus/pci/devices/a/class": "0x030000\n"}, True),
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n", "sys/bus/pci/devices/a/class": "0x030200\n"}, True),
        # The sound of a graphics card, graphics of another maker, and a device that went away.
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n", "sys/bus/pci/devices/a/class": "0x040300\n"}, False),
        ({"sys/bus/pci/devices/a/vendor": "0x8086\n", "sys/bus/pci/devices/a/class": "0x030000\n"}, False),
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n"}, False),
    ],
)
def test_a_gpu_is_there_whether_it_can_be_used_or_not(
    files: dict[str, str], present: bool, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert gather_facts(tmp_path).present is present


def test_the_compiler_is_the_one_that_triton_would_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("clang", "tcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert gather_facts().compiler == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "tcc")
    assert gather_facts().compiler == str(tmp_path / "tcc")
    monkeypatch.setenv("CC", "icc")
    assert gather_facts().compiler == ""


def test_who_wants_no_gpu_has_none_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise AssertionError("looked")

    monkeypatch.setattr(torch.cuda, "init", look)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for settings in ({"backend": "cpu"}, {"backend": "reference"}, {"device": "cpu"}):
        assert find_gpu(EngineConfig(model_path="/m", **settings)) is NO_GPU


def test_the_interpreter_stands_for_a_gpu_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_gpu(EngineConfig(model_path="/m", backend="gpu")) == torch.device("cpu")
    fault = find_gpu(EngineConfig(model_path="/m"))
    assert isinstance(fault, GpuFault)
    assert not fault.present


def test_the_first_kernel_computes_what_it_should() -> None:
    pytest.importorskip("triton")
    code = (
        "import torch; from appliance.engine.gpu import check;"
        "print(repr(check.attempt(lambda: check._run_a_kernel(torch.device('cpu')))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "''\n"


def test_a_process_without_standard_error_finds_faults_too() -> None:
    program = (
        "import os; os.close(2); from appliance.engine.gpu.check import attempt;"
        "print(repr(attempt(lambda: [][0])))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "'list index out of range\\n'\n"
