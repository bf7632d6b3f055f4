"""The wheel: built from this tree, installed into an empty environment, run away from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

GENERATE = """
from appliance import LLM, SamplingParams
out = LLM({model!r}, kv_cache_memory_bytes=2**20).generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4))
assert out[0].outputs[0].token_ids and "site-packages" in __import__("appliance").__file__
"""


def build_wheel(repo_root: Path, out: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out)]
    command += [f"--config-settings=build-dir={out / 'build'}", str(repo_root)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("appliance-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel in it; what the wheel depends on is borrowed from this one."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def version(scripts: Path) -> str:
    """What the installed command says of itself."""
    command = [scripts / "appliance", "version"]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout


def generate(scripts: Path, golden: Path) -> None:
    code = GENERATE.format(model=str(golden / "gguf_q4_1" / "mini-q4_1.gguf"))
    subprocess.run([scripts / "python", "-c", code], cwd="/", check=True)


@pytest.fixture(scope="module")
def native_wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(repo_root, tmp_path_factory.mktemp("native"))


def test_the_wheel_holds_the_package_and_no_sources_of_the_library(native_wheel: Path) -> None:
    names = zipfile.ZipFile(native_wheel).namelist()
    assert "appliance/kernels/_native.so" in names
    assert "appliance/engine/scheduler.py" in names
    assert "appliance/models.toml" in names
    assert not [name for name in names if name.endswith((".cpp", "CMakeLists.txt"))]
    assert not [
        name for name in names if name.split("/")[0] in {"engine", "kernels", "quant", "tui", "tests"}
    ]


def test_the_installed_wheel_runs(native_wheel: Path, golden: Path, tmp_path: Path) -> None:
    scripts = install(native_wheel, tmp_path / "env")
    assert "native library: built" in version(scripts)
    generate(scripts, golden)


def test_without_a_compiler_it_installs_runs_and_says_so(
    repo_root: Path, golden: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(repo_root, tmp_path / "pure", CC="/no/such/cc", CXX="/no/such/c++")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    scripts = install(wheel, tmp_path / "env")
    assert "not built (no C++ compiler at install)" in version(scripts)
    generate(scripts, golden)
