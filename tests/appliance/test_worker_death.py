"""The worker is killed in mid-stream: one typed error, a replay, and everything goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_daemon import MODEL, LiveDaemon, eventually, freed_within_s, live_daemon

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
    assert eventually(narrow.is_idle, freed_within_s(narrow))
    # Totals go on where the dead worker's ended: at least the replayed and the last prompt came on top.
    assert narrow.metric("appliance_prefix_cache_lookup_tokens_total") >= lookups + 2 * 37
    assert narrow.stop() == 0
