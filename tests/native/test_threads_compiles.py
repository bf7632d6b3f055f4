"""The program that sanitizers run is kept in step with the runtime whose operations it uses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def test_threads_compiles() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    source = Path(__file__).with_name("threads.cpp")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
