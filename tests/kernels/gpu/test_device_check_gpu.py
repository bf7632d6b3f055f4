"""The check of a device, run whole by the interpreter with tiny sizes, and what it makes of what goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.device_check.parity import poisoned, strayed, worst
from benchmarks.device_check.report import Row, error, problems, run_apart, table

CPU = torch.device("cpu")
# What the project depends on, but for torch and numpy.
_ABSENT = (
    *("fastapi", "gguf", "httpx", "jinja2", "msgspec", "platformdirs", "prometheus_client", "psutil"),
    *("pydantic", "pydantic_core", "pynvml", "rich", "tokenizers", "tomli", "typer", "uvicorn", "zmq"),
)
_RUN = """
import runpy, sys
sys.modules.update(dict.fromkeys({absent!r}))
sys.argv = ["device_check", "--tiny", "--out", {out!r}]
runpy.run_module("benchmarks.device_check", run_name="__main__", alter_sys=True)
"""


def test_runs_from_a_checkout_with_torch_and_triton_alone(repo_root: Path, tmp_path: Path) -> None:
    # -S: where the project is installed, it is not found.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", _RUN.format(absent=_ABSENT, out=str(tmp_path))],
        cwd=repo_root,
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "device_check.json").read_text())
    assert set(found) == {
        "bandwidth",
        *(f"parity of {name}, float16" for name in ("products", "rows", "attention")),
        "parity of models, float16, 1",
        *("products", "model", "torch model", "attention", "row kernels", "swap"),
    }
    for name, section in found.items():
        assert section["rows"], name
        assert not section["failure"], name
    times = {row["what"]: row for row in found["attention"]["rows"]}
    assert {"decode, 2 × 20 tokens, int8 KV, slabs", "decode, 2 × 20 tokens, int8 KV, layer-major"} < set(
        times
    )
    assert all(row["bound"] > 0 for row in times.values())
    assert (tmp_path / "device_check.md").read_text() in done.stdout


def test_what_a_section_found_outlives_its_exception_and_its_time() -> None:
    def fails() -> Iterator[Row]:
        yield Row("before", 1.0, "s")
        raise ValueError("broken kernel")

    def hangs() -> Iterator[Row]:
        yield error("before", 2.0)
        time.sleep(600)

    def dies() -> Iterator[Row]:
        yield Row("before", 3.0, "s", 1.5)
        os._exit(7)

    found = run_apart({"fails": fails, "hangs": hangs, "dies": dies}, CPU, 3.0)
    assert {name: [row.value for row in each.rows] for name, each in found.items()} == {
        "fails": [1.0],
        "hangs": [2.0],
        "dies": [3.0],
    }
    assert problems(found) == [
        "fails: ValueError: broken kernel",
        "hangs: stopped after 3 s",
        "dies: ended with 7",
        "hangs: before: 2 of the tolerance",
    ]
    assert "| before | 3 s | 1.5 | 50% of the floor |" in table(found)


def test_what_is_wrong_is_seen() -> None:
    out = poisoned(3, 8, torch.float16, CPU)
    assert strayed(out) == 3 * 8
    out.fill_(1.0)
    assert strayed(out) == 0
    out.as_strided((1,), (1,), out.storage_offset() + 8).fill_(0.0)
    out[1, 2] = math.nan
    assert strayed(out) == 2
    assert worst(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]).double(), 0.25) == 2.0
    assert worst(out, torch.ones(3, 8).double(), 1.0) == math.inf
    assert error("", math.inf).failed
    assert error("", math.nan).failed
    assert not error("", 1.0).failed
    assert not error("", 0.0, "bits", 0.0).failed
