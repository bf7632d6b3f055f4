"""What the owner can set: names, keys, limits; and the time before the model is loaded."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from live_daemon import BLOCK_BYTES, MODEL, START_TIMEOUT_S, LiveDaemon, eventually, live_daemon

pytestmark = pytest.mark.starter

HI = [{"role": "user", "content": "Hi"}]
KEY = {"Authorization": "Bearer secret"}
# Long enough for a first token on a busy machine, so that a stream has begun when it is ended.
TIMEOUT_S = 4.0


@pytest.fixture(scope="module")
def kept(starter_models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """A daemon with a key, a name of the owner's and little patience."""
    settings = {"api_key": "secret", "served_model_name": "house-model", "request_timeout": TIMEOUT_S}
    settings["max_num_seqs"] = 200
    settings["backend"] = "reference"  # slow enough that a whole context takes longer than that
    with live_daemon(starter_models_dir, tmp_path_factory.mktemp("kept"), **settings) as daemon:
        yield daemon


def endless(**fields: Any) -> dict[str, Any]:
    return {"model": "house-model", "messages": HI, "ignore_eos": True, **fields}


def test_without_the_key_nothing_but_health_is_told(kept: LiveDaemon) -> None:
    assert [kept.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 401]
    assert [httpx.head(kept.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
    refused = kept.post("/v1/chat/completions", endless())
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    models = openai.OpenAI(base_url=f"{kept.url}/v1", api_key="secret").models.list()
    assert [model.id for model in models] == ["house-model"]


def test_the_limits_in_force_are_shown(kept: LiveDaemon) -> None:
    (model,) = httpx.get(f"{kept.url}/v1/models", headers=KEY).json()["data"]
    limits = {name: model[name] for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
    # Every request may have a token, so a step has room for more than the default of 128.
    assert limits == {"max_model_len": 512, "max_num_seqs": 200, "max_num_batched_tokens": 200}


def test_a_request_that_takes_too_long_is_ended_and_told(kept: LiveDaemon) -> None:
    began = time.monotonic()
    whole = kept.post("/v1/chat/completions", endless(), **KEY)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
    assert TIMEOUT_S - 0.1 < time.monotonic() - began < TIMEOUT_S + 2.5
    streamed = kept.post("/v1/chat/completions", endless(stream=True), **KEY)
    assert streamed.status_code == 200
    last = streamed.text.strip().rsplit("\n\n", 1)[1]
    assert '"code": "request_timeout"' in last
    assert "[DONE]" not in streamed.text

    def used() -> str:
        metrics = httpx.get(f"{kept.url}/metrics", headers=KEY).text
        return next(
            line
            for line in metrics.splitlines()
            if line.startswith("appliance_kv_blocks{") and 'state="used"' in line
        )

    assert eventually(lambda: used().endswith(" 0.0"), 5.0)


def test_while_the_model_loads_health_answers_and_requests_wait(
    starter_models_dir: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = LiveDaemon(starter_models_dir, tmp_path, port=port)
    try:
        daemon.url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            try:
                return daemon.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        assert eventually(is_up, 30.0)
        ready = daemon.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, f"{MODEL} is loading")
        assert daemon.post("/v1/completions", {"model": "other", "prompt": "Hi"}).status_code == 404
        answer = daemon.post("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 1})
        assert answer.status_code == 200
        assert daemon.get("/ready").status_code == 200
    finally:
        daemon.end()


def unseeded(daemon: LiveDaemon) -> list[str]:
    """Sampled answers to requests that bring no seed, one after the other."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 6, "temperature": 1}
    return [daemon.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(3)]


def test_a_seed_repeats_answers_after_a_restart_of_the_worker_and_another_gives_others(
    starter_models_dir: Path, tmp_path: Path
) -> None:
    with live_daemon(starter_models_dir, tmp_path, seed=42) as daemon:
        first = unseeded(daemon)
        assert len(set(first)) == 3
        daemon.worker().kill()
        assert eventually(lambda: daemon.metric("appliance_worker_restarts_total") == 1, START_TIMEOUT_S)
        assert unseeded(daemon) == first
    with live_daemon(starter_models_dir, tmp_path, seed=43) as daemon:
        assert not set(unseeded(daemon)) & set(first)


def test_gpu_memory_utilization_sizes_the_pool_of_a_daemon(starter_models_dir: Path, tmp_path: Path) -> None:
    share = 100 * BLOCK_BYTES / psutil.virtual_memory().available
    settings = {"kv_cache_memory_bytes": "", "gpu_memory_utilization": share}
    with live_daemon(starter_models_dir, tmp_path, **settings) as daemon:
        assert eventually(lambda: daemon.metric("appliance_kv_blocks") > 0, 1.0)
        # The weights come first, and other programs take and free memory meanwhile.
        assert 80 <= daemon.metric("appliance_kv_blocks") <= 120
