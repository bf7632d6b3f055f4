"""The programs that docs/deploy is for, run for real on free ports of the loopback address."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from live_daemon import eventually

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
DEBIAN_PACKAGE = {"promtool": "prometheus", "prometheus": "prometheus", "nginx": "nginx-light"}


def program(name: str) -> str:
    """Its path. A test that needs it is skipped where there is none."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed; on Debian: apt-get install {DEBIAN_PACKAGE[name]}")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def replaced(text: str, changes: dict[str, str]) -> str:
    """`text` with each key, which occurs once, replaced."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    return text


def responds(url: str) -> Callable[[], bool]:
    """Whether somebody answers there, whatever it is; to be asked again and again."""

    def asked() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url).status_code > 0
        return False

    return asked


@contextlib.contextmanager
def running(command: list[str], log: Path, is_up: Callable[[], bool]) -> Iterator[None]:
    """The program is up; afterwards it has ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: process.poll() is not None or is_up(), 20.0), log.read_text()
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
