"""How far a model is loaded: on a terminal, in the log, over HTTP, and that a long load is no hang."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from live_daemon import environment, eventually
from random_model import write_model
from slow_reader import slow_python
from test_run_cli import Terminal, free_port

from appliance.daemon import worker
from appliance.engine.config import EngineConfig
from appliance.engine.machine import usable_cpus
from appliance.engine.protocol import HEARTBEAT_S
from appliance.progress import PLAIN_EVERY_S

LAYERS = 12
READS = 7 * LAYERS
BAR = "━━━"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", hidden=64, layers=LAYERS)


def pause_for(load_s: float) -> float:
    """Between the reads, of which each thread does its share."""
    return load_s * usable_cpus() / READS


@pytest.fixture
def serving(folder: Path, tmp_path: Path) -> Iterator[Callable[[float], tuple[subprocess.Popen[str], str]]]:
    """Starts a daemon without a terminal whose worker takes so long to read; the process and its address."""
    started: list[subprocess.Popen[str]] = []

    def serve(load_s: float) -> tuple[subprocess.Popen[str], str]:
        port = free_port()
        command = [slow_python(tmp_path, pause_for(load_s)), "-m", "appliance.cli.main", "serve", str(folder)]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=environment(tmp_path / "models", tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield serve
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_is_told_over_http_and_in_the_log(
    serving: Callable[[float], tuple[subprocess.Popen[str], str]],
) -> None:
    process, url = serving(7.0)
    seen: list[tuple[float, float]] = []

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            answer = httpx.get(f"{url}/ready")
        except httpx.TransportError:
            return False
        if answer.status_code == 200:
            assert answer.json() == {"status": "ready"}
            return True
        assert answer.json()["reason"] == "m is loading"
        share = answer.json()["loading"]
        if share and (not seen or share != seen[-1][1]):
            seen.append((time.monotonic(), share))
            if share < 0.6:  # else it may have loaded before it is asked again
                (model,) = httpx.get(f"{url}/v1/models").json()["data"]
                assert share <= model["loading"] < 1
                assert model["max_model_len"] is None
                assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        return False

    assert eventually(is_ready, 120)
    times, shares = zip(*seen, strict=True)
    assert list(shares) == sorted(shares)
    assert shares[0] < 0.1 < 0.4 < shares[len(shares) // 2] < 0.6 < 0.9 < shares[-1]
    assert len(shares) <= (times[-1] - times[0]) / HEARTBEAT_S + 2
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (model["loading"], model["max_model_len"]) == (None, 512)
    process.terminate()
    _, log = process.communicate()
    percents = [int(percent) for percent in re.findall(r"^loading m (\d+)%$", log, re.MULTILINE)]
    assert percents
    assert len(percents) <= (times[-1] - times[0]) / PLAIN_EVERY_S
    assert 50 < percents[0] < 100
    assert BAR not in log


@pytest.mark.parametrize(("command", "then"), [(["serve", "--port", "0"], "m is ready"), (["run"], ">>> ")])
def test_a_terminal_sees_a_bar(folder: Path, tmp_path: Path, command: list[str], then: str) -> None:
    program = [slow_python(tmp_path, pause_for(2.0)), "-m", "appliance.cli.main"]
    settings = environment(tmp_path / "models", tmp_path, port=free_port())
    terminal = Terminal([*program, command[0], str(folder), *command[1:]], settings, tmp_path, kind="xterm")
    try:
        terminal.wait_for(BAR)
        terminal.wait_for("%")
        terminal.wait_for(then)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.process.wait(30)
    finally:
        terminal.close()


OFFLINE = """
import asyncio, sys
from appliance import LLM, AsyncLLM
if sys.argv[1] == "sync":
    LLM(sys.argv[2], kv_cache_memory_bytes=2**23).close()
else:
    asyncio.run(AsyncLLM(sys.argv[2], kv_cache_memory_bytes=2**23).close())
"""


def load_offline(python: str, kind: str, folder: Path, home: Path, stderr: int) -> None:
    (home / "offline.py").write_text(OFFLINE)
    done = subprocess.run(
        [python, "-m", "offline", kind, str(folder)],
        env={**environment(home / "models", home), "TERM": "xterm"},
        cwd=home,
        stderr=stderr,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, b"")


def seen_offline(python: str, kind: str, folder: Path, home: Path) -> str:
    """What a terminal gets."""
    main, terminal = pty.openpty()
    load_offline(python, kind, folder, home, terminal)
    os.write(terminal, b"|")
    os.close(terminal)
    seen = os.read(main, 65536)
    os.close(main)
    return seen.decode().removesuffix("|")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_terminal_of_the_offline_api_sees_a_bar(folder: Path, tmp_path: Path, kind: str) -> None:
    seen = seen_offline(slow_python(tmp_path, pause_for(1.5)), kind, folder, tmp_path)
    assert BAR in seen
    shares = [int(share) for share in re.findall(r"(\d+)%", seen)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 100


def test_a_quick_load_says_nothing(folder: Path, tmp_path: Path) -> None:
    assert seen_offline(sys.executable, "sync", folder, tmp_path) == ""


def test_the_offline_api_says_nothing_where_there_is_no_terminal(folder: Path, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        load_offline(slow_python(tmp_path, pause_for(1.5)), "sync", folder, tmp_path, stderr.fileno())
    assert (tmp_path / "stderr").read_bytes() == b""


def handle(folder: Path) -> worker.WorkerHandle:
    return worker.WorkerHandle(EngineConfig(model_path=str(folder), kv_cache_memory_bytes=2**23))


def test_a_load_that_goes_on_is_not_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", slow_python(tmp_path, pause_for(5.0)))
    monkeypatch.setattr(worker, "LOAD_TIMEOUT_S", 60.0)
    news: list[float] = []

    async def scenario() -> None:
        loaded = handle(folder)

        def told(share: float) -> None:
            worker.LOAD_TIMEOUT_S = 2.0
            news.append(time.monotonic())
            assert loaded.loading == share

        try:
            await loaded.start(told)
            assert (loaded.loading, loaded.not_ready) == (None, "")
        finally:
            await loaded.stop()

    asyncio.run(scenario())
    assert news[-1] - news[0] > 2.0


def test_a_load_that_stands_still_is_given_up(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", slow_python(tmp_path, pause_for(5.0)))
    monkeypatch.setattr(worker, "LOAD_TIMEOUT_S", 60.0)
    before = set(psutil.Process().children())
    stopped: list[psutil.Process] = []

    async def scenario() -> None:
        stuck = handle(folder)

        def told(_share: float) -> None:
            worker.LOAD_TIMEOUT_S = 0.5
            if not stopped:
                stopped.extend(set(psutil.Process().children()) - before)
                stopped[0].suspend()

        with pytest.raises(
            worker.WorkerUnavailableError, match=r"came no further with loading .* for 0\.5 s"
        ):
            await stuck.start(told)
        assert stuck.loading is None
        await stuck.stop()

    asyncio.run(scenario())
    assert len(stopped) == 1
    assert not stopped[0].is_running()
