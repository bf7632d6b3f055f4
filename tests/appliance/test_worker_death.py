"""The worker is killed in mid-stream: one typed error, a replay, and everything goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from live_daemon import BLOCK_BYTES, FREED_WITHIN_S, MODEL, LiveDaemon, eventually, live_daemon

from appliance.daemon import worker
from appliance.daemon.events import EventStream
from appliance.engine.config import EngineConfig
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request, TokenEvent

pytestmark = pytest.mark.starter


@pytest.fixture
def narrow(starter_models_dir: Path, tmp_path: Path) -> Iterator[LiveDaemon]:
    """A daemon that runs one request at a time, so that a second one waits."""
    with live_daemon(starter_models_dir, tmp_path, max_num_seqs=1) as daemon:
        yield daemon


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    return api.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)


def test_only_the_request_in_the_fatal_step_is_lost(narrow: LiveDaemon) -> None:
    api = narrow.openai()
    ask(api)
    lookups = narrow.metric("appliance_prefix_cache_lookup_tokens_total")
    victim = iter(ask(api, stream=True, extra_body={"ignore_eos": True}))
    for _ in range(3):
        next(victim)
    answers: list[str] = []
    queued = threading.Thread(target=lambda: answers.append(ask(api).choices[0].message.content))
    queued.start()
    assert eventually(lambda: narrow.metric("appliance_requests_waiting") == 1, 10.0)

    narrow.worker().send_signal(signal.SIGKILL)

    with pytest.raises(openai.APIError, match="SIGKILL") as raised:
        list(victim)
    assert raised.value.code == "worker_died"
    assert list(victim) == []
    assert narrow.get("/health").status_code == 200
    queued.join(60)
    assert answers == ["The capital of France is Paris."]
    assert ask(api).choices[0].message.content == "The capital of France is Paris."

    assert narrow.get("/ready").status_code == 200
    assert narrow.metric("appliance_worker_restarts_total") == 1
    assert narrow.metric("appliance_request_errors_total", code="worker_died") == 1
    assert eventually(narrow.is_idle, FREED_WITHIN_S)
    # Totals go on where the dead worker's ended: at least the replayed and the last prompt came on top.
    assert narrow.metric("appliance_prefix_cache_lookup_tokens_total") >= lookups + 2 * 37
    assert narrow.stop() == 0


def count_on(name: str, max_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(id=name, prompt_ids=(33, 28, 216, 34, 28), sampling=sampling, arrived_at=0.0)


async def everything(stream: EventStream) -> tuple[int, TokenEvent]:
    """How many tokens came, and the terminal event."""
    events = [event async for event in stream]
    return sum(len(event.token_ids) for event in events), events[-1]


def test_a_hung_worker_is_killed_and_replaced(starter_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HANG_S", 5.0)
    monkeypatch.setattr(worker, "WATCH_S", 0.5)
    memory = {"kv_cache_memory_bytes": 64 * BLOCK_BYTES, "max_model_len": 512}

    async def scenario() -> None:
        handle = worker.WorkerHandle(EngineConfig(model_path=str(starter_model), max_num_seqs=1, **memory))
        try:
            await handle.start()
            running, waiting = handle.submit(count_on("running", 400)), handle.submit(count_on("waiting", 4))
            assert len((await anext(running)).token_ids) == 1
            assert handle._process is not None
            os.kill(handle._process.pid, signal.SIGSTOP)
            _, end = await everything(running)
            assert end.error is not None
            assert (end.finish_reason, end.error.code) == ("error", "worker_died")
            tokens, end = await everything(waiting)
            assert (tokens, end.finish_reason, handle.restarts) == (4, "length", 1)
        finally:
            await handle.stop()

    asyncio.run(scenario())


def test_a_worker_that_hangs_with_nothing_to_do_is_noticed_too(
    starter_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SILENT_S", 1.0)
    monkeypatch.setattr(worker, "HANG_S", 2.0)
    monkeypatch.setattr(worker, "WATCH_S", 0.5)
    memory = {"kv_cache_memory_bytes": 64 * BLOCK_BYTES, "max_model_len": 512}

    async def scenario() -> None:
        handle = worker.WorkerHandle(EngineConfig(model_path=str(starter_model), **memory))
        try:
            await handle.start()
            assert handle.not_ready == ""
            assert handle._process is not None
            os.kill(handle._process.pid, signal.SIGSTOP)
            seen = []
            while not handle.restarts:
                await asyncio.sleep(0.2)
                seen.append(handle.not_ready)
            assert any("has been silent for" in reason for reason in seen)
            assert "the engine worker is being restarted" in seen
            assert handle.not_ready == ""
        finally:
            await handle.stop()

    asyncio.run(scenario())


def test_a_model_that_never_loads_is_given_up(starter_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LOAD_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        handle = worker.WorkerHandle(EngineConfig(model_path=str(starter_model), max_model_len=512))
        with pytest.raises(
            worker.WorkerUnavailableError, match=r"came no further with loading the model for 0\.2 s"
        ):
            await handle.start()
        assert "came no further" in handle.not_ready
        await handle.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_worker_that_starts_does_not_outlive_its_daemon(
    starter_models_dir: Path, tmp_path: Path, delay_s: float
) -> None:
    daemon = LiveDaemon(starter_models_dir, tmp_path)
    children = psutil.Process(daemon.process.pid).children
    assert eventually(lambda: bool(children()), 30.0)
    orphans = children()
    time.sleep(delay_s)
    daemon.process.kill()
    daemon.process.wait()
    _, alive = psutil.wait_procs(orphans, timeout=5)
    assert alive == []
