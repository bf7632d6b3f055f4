"""Servers to compare over HTTP, each a process of its own that `appliance bench` asks in turn."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

APPLIANCE = Path(sys.executable).with_name("appliance")
START_TIMEOUT_S = 600.0
MAX_STREAMS, CONTEXT = 16, 1536


def command(peer: str, program: Path, model: Path, port: int, threads: int) -> list[str]:
    """How a server is started; `program` is the peer's own executable."""
    if peer == "ours":
        words = [APPLIANCE, "serve", model, "--num-threads", threads, "--max-model-len", CONTEXT]
    elif peer == "llama.cpp":
        words = [program, "-m", model, "-t", threads, "-np", MAX_STREAMS, "-c", MAX_STREAMS * CONTEXT]
    else:
        words = [program, "serve", model, "--max-model-len", CONTEXT, "--max-num-seqs", MAX_STREAMS]
    return [str(word) for word in (*words, "--port", port)]


@contextlib.contextmanager
def running(peer: str, program: Path, model: Path, threads: int) -> Iterator[str]:
    """The URL of a server that has loaded its model; it is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    # vLLM takes its threads and the size of its KV memory from the environment.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "2"}
    words = command(peer, program, model, port, threads)
    child = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=None if peer == "ours" else environment,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url + ("/ready" if peer == "ours" else "/health")):
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(words)} did not start")
            time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        child.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, more: list[str]) -> dict[str, float]:
    """One round of `appliance bench`: figures by name; of several streams both speeds."""
    words = [str(APPLIANCE), "bench", "--url", url, "--rounds", "1", "--json", *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = {}
    for row in json.loads(done.stdout)["figures"]:
        if row["name"] == "streams":
            found[f"{row['streams']} streams, in all"] = row["tokens_per_s"]
            if row["steady_tokens_per_s"] is not None:
                found[f"{row['streams']} streams, steady"] = row["steady_tokens_per_s"]
        else:
            found[row["name"]] = row["tokens_per_s"]
        found[f"first token: {row['name']}, {row['streams']} at once (s)"] = row["ttft_p50_s"]
    return found
