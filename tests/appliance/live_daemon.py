"""A real `appliance serve` in a process of its own, for the tests of the API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

MODEL = "smollm2:135m"
# One block of the starter's KV memory (16 tokens) takes 360 KiB.
BLOCK_BYTES = 360 * 1024
# With which the starter, a very small model, answers as it does in float32, word for word.
PRECISION = "bf16"
START_TIMEOUT_S = 120.0
# How soon the blocks of a request whose client left must be free.
FREED_WITHIN_S = 1.0


PROGRAM = (sys.executable, "-m", "appliance.cli.main")


def command(*arguments: str) -> list[str]:
    return [*PROGRAM, *arguments]


def environment(models_dir: Path, home: Path, **settings: Any) -> dict[str, str]:
    """Ours without any setting of whoever runs the tests."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("APPLIANCE_")}
    settings = {"download_dir": models_dir, "config_dir": home / "config", **settings}
    return clean | {f"APPLIANCE_{name.upper()}": str(value) for name, value in settings.items()}


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class LiveDaemon:
    """A started daemon; `url` is known once it is ready."""

    program: tuple[str, ...] = PROGRAM
    model: str = MODEL

    def __init__(self, models_dir: Path, home: Path, **settings: Any) -> None:
        settings = {
            "kv_cache_memory_bytes": 300 * BLOCK_BYTES,
            "max_model_len": 512,
            "port": 0,
            "activation_precision": PRECISION,
            **settings,
        }
        self._out, self._err = home / "stdout", home / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*self.program, "serve", self.model],
                cwd=home,
                env=environment(models_dir, home, **settings),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.url = ""

    @property
    def greeting(self) -> str:
        return self._out.read_text()

    @property
    def log(self) -> str:
        return self._err.read_text()

    def wait_until_ready(self) -> None:
        def greeted() -> bool:
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            return "Ctrl-C stops it." in self.greeting

        assert eventually(greeted, START_TIMEOUT_S), f"the daemon is not ready: {self.log}"
        found = re.search(r'base_url="(https?://127\.0\.0\.1:\d+)/v1"', self.greeting)
        assert found, self.greeting
        self.url = found[1]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, headers=headers, timeout=120, **content)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 where there are none yet."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return float(sum(sample.value for sample in samples if labels.items() <= sample.labels.items()))

    def is_idle(self) -> bool:
        """No request holds anything."""
        running = self.metric("appliance_requests_running") + self.metric("appliance_requests_waiting")
        return running + self.metric("appliance_kv_blocks", state="used") == 0

    def worker(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1, f"{len(children)} workers"
        return children[0]

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def end(self) -> None:
        """Be gone, whatever state it is in."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Impatient(LiveDaemon):
    """Pings after half a second of silence instead of 15."""

    program = (
        sys.executable,
        "-c",
        "from appliance.daemon import sse; sse.PING_S = 0.5; from appliance.cli.main import main; main()",
    )


@contextlib.contextmanager
def live_daemon(
    models_dir: Path, home: Path, kind: type[LiveDaemon] = LiveDaemon, **settings: Any
) -> Iterator[LiveDaemon]:
    """A daemon that is ready; gone afterwards, with its worker, whatever happened."""
    daemon = kind(models_dir, home, **settings)
    try:
        daemon.wait_until_ready()
        yield daemon
    finally:
        daemon.end()
