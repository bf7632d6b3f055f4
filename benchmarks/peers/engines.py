"""Commands that measure an engine in its own process, and what they print: figures by the names engine.py gives."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
Figures = dict[str, float]
STREAMS = (8, 16)
TOKENS, PREFILL = 128, 512


def ours(model: Path, threads: int, more: list[str]) -> Figures:
    seed = int.from_bytes(os.urandom(4), "big")
    words = ["--model", model, "--threads", threads, "--rounds", 1, "--tokens", TOKENS, "--seed", seed]
    out = _run([sys.executable, HERE.parent / "engine.py", *words, "--csv", "-", *more])
    return {row["figure"]: float(row["median"]) for row in csv.DictReader(out.splitlines())}


def llama_cpp(programs: Path, model: Path, threads: int, more: list[str]) -> Figures:
    """`llama-bench`, and for several streams `llama-batched-bench`; `programs` is the folder that has both."""
    common = ["-m", model, "-t", threads, *more]
    single = [programs / "llama-bench", *common, "-p", PREFILL, "-n", TOKENS, "-r", 1, "-o", "json"]
    figures: Figures = {}
    for row in json.loads(_run(single)):
        figures[f"prefill {PREFILL}" if row["n_prompt"] else "decode, 1 stream"] = row["avg_ts"]
    context = max(STREAMS) * 2 * TOKENS
    several = ["-c", context, "-npp", 32, "-ntg", TOKENS, "-npl", ",".join(map(str, STREAMS))]
    for line in _run(
        [programs / "llama-batched-bench", *common, *several, "--output-format", "jsonl"]
    ).splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            figures[f"decode, {row['pl']} streams"] = row["speed_tg"]
    return figures


def script(name: str) -> Callable[[Path, Path, int, list[str]], Figures]:
    """A measurement by `{name}_engine.py` in the peer's venv."""

    def measure(python: Path, model: Path, threads: int, more: list[str]) -> Figures:
        command = [python, HERE / f"{name}_engine.py", model, "--threads", threads, "--tokens", TOKENS, *more]
        found: Figures = json.loads(_run(command).splitlines()[-1])
        return found

    return measure


def _run(command: list[object]) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
