"""Some kernels compiled for a GPU: no worse than the kept table says. `make gpu-report` does all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_KEPT = "benchmarks/gpu_report/kept.json"


def test_every_tile_adds_in_the_same_order_on_a_device(repo_root: Path) -> None:
    for architectures in json.loads((repo_root / _KEPT).read_text()).values():
        for table in architectures.values():
            products = {found["products"] for name, found in table.items() if name.startswith("linear ")}
            assert len(products) == 1


@pytest.mark.parametrize("variant", ["linear zp4 g128 fp16 8x64 2w 4s", "linear kquant4 g32 bf16 8x64 2w 4s"])
def test_as_good_as_kept(variant: str, repo_root: Path) -> None:
    # A process of its own: this one interprets.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--architecture", "86", "--only", variant]
    done = subprocess.run(
        command, cwd=repo_root, env=environment, capture_output=True, text=True, check=False
    )
    assert f"sm_86 {variant}" in done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
