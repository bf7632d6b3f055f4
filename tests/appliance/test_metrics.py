"""What is measured, and that the documentation names all of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from live_daemon import MODEL, LiveDaemon, eventually
from prometheus_client.parser import text_string_to_metric_families

import appliance
from appliance import SamplingParams
from appliance.daemon.events import Flights
from appliance.daemon.metrics import Metrics, RequestTimer
from appliance.daemon.metrics_docs import table
from appliance.engine.types import Request, TokenEvent


def test_the_documentation_is_what_the_registry_says(repo_root: Path) -> None:
    found = (repo_root / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert found == table(), "docs/metrics.md is out of date: python -m appliance.daemon.metrics_docs"


def value(metrics: Metrics, name: str, **labels: str) -> float:
    samples = [sample for family in metrics.families() for sample in family.samples]
    return sum(s.value for s in samples if s.name == f"appliance_{name}" and s.labels == labels)


class Served:
    """A request that arrived 8 s ago, and its timer, whose clock stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metrics = Metrics(dict)
        self.now = 1000.0
        monkeypatch.setattr("appliance.daemon.metrics.time", SimpleNamespace(monotonic=lambda: self.now))
        self.flights = Flights()
        sampling = SamplingParams()
        request = Request(id="a", prompt_ids=(1, 2, 3), sampling=sampling, arrived_at=self.now - 8)
        stream = self.flights.open(request).stream
        self.timer = RequestTimer(self.metrics, self.now - 8, 3, stream)

    def sums(self) -> dict[str, float]:
        """Seconds of queue, prefill and decode; only of those that were observed."""
        names = ("queue", "prefill", "decode")
        counted = [name for name in names if value(self.metrics, f"request_{name}_seconds_count") == 1]
        return {name: value(self.metrics, f"request_{name}_seconds_sum") for name in counted}


def test_queue_ends_with_the_first_step_and_prefill_with_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        served = Served(monkeypatch)
        served.flights.step_began(["a", "someone else"], served.now - 3)
        served.flights.step_began(["a"], served.now - 1)
        served.timer.saw(TokenEvent(request_id="a", token_ids=(5,)))
        served.timer.saw(TokenEvent(request_id="a", index=1, token_ids=(5,), finish_reason="stop"))
        assert served.sums() == {"queue": 5.0, "prefill": 3.0}
        served.now += 0.5
        served.timer.saw(TokenEvent(request_id="a", token_ids=(6, 7), finish_reason="length"))
        served.timer.finished("length")
        served.timer.ended()
        assert served.sums() == {"queue": 5.0, "prefill": 3.0, "decode": 0.5}
        assert value(served.metrics, "request_prompt_tokens_sum") == 3
        assert value(served.metrics, "request_generated_tokens_sum") == 4
        # Two tokens came at once 0.5 s after the one before; the first of each continuation has none before it.
        assert value(served.metrics, "inter_token_latency_seconds_count") == 1
        assert value(served.metrics, "inter_token_latency_seconds_sum") == 0.25
        assert value(served.metrics, "requests_total", finish_reason="length") == 1

    asyncio.run(scenario())


def test_a_request_that_never_began_has_queued_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        served = Served(monkeypatch)
        served.timer.ended()
        assert served.sums() == {"queue": 8.0}
        assert value(served.metrics, "requests_total", finish_reason="abort") == 1

    asyncio.run(scenario())


@pytest.mark.starter
def test_every_metric_of_a_daemon_is_documented_with_its_labels(daemon: LiveDaemon, repo_root: Path) -> None:
    page = (repo_root / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    documented = {name: set(re.findall(r"\w+", labels)) for name, _, labels in rows}
    daemon.get("/nowhere")
    live = {}
    for family in text_string_to_metric_families(daemon.get("/metrics").text):
        suffix = "_total" if family.type == "counter" else ""
        live[family.name + suffix] = {key for s in family.samples for key in s.labels} - {"le"}
    assert live == documented


@pytest.mark.starter
def test_requests_are_counted_by_how_they_end(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    def counts() -> list[int]:
        reasons = ("stop", "length", "abort", "error")
        return [int(daemon.metric("appliance_requests_total", finish_reason=reason)) for reason in reasons]

    def ask(**fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": "Count from one to ten."}]
        return api.chat.completions.create(model=MODEL, messages=messages, temperature=0, **fields)

    before = counts()
    ask(max_tokens=2)
    ask(stop=" ", max_tokens=50)
    stream = ask(stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()  # which ends the connection; an iterator's end alone leaves it to a collection of garbage
    expected = [before[0] + 1, before[1] + 1, before[2] + 1, before[3]]
    assert eventually(lambda: counts() == expected, 2.0), (before, counts())


@pytest.mark.starter
def test_queue_and_prefill_are_the_time_to_the_first_token(daemon: LiveDaemon, api: openai.OpenAI) -> None:
    names = ("request_queue", "request_prefill", "time_to_first_token")

    def sums() -> list[float]:
        return [daemon.metric(f"appliance_{name}_seconds_sum") for name in names]

    before = sums()
    text = "How long is a piece of string?"
    api.completions.create(model=MODEL, prompt=text, max_tokens=2, extra_body={"ignore_eos": True})
    queue, prefill, first_token = (now - then for now, then in zip(sums(), before, strict=True))
    assert queue > 0
    assert prefill > 0.001
    assert queue + prefill == pytest.approx(first_token)


@pytest.mark.starter
def test_errors_are_counted_by_code_and_status(daemon: LiveDaemon) -> None:
    labels = {"code": "model_not_found", "status": "404"}
    before = daemon.metric("appliance_request_errors_total", **labels)
    daemon.post("/v1/completions", {"model": "no-such-model", "prompt": "a"})
    assert daemon.metric("appliance_request_errors_total", **labels) == before + 1
    # Those that alerts look at are there from the beginning.
    page = daemon.get("/metrics").text
    assert 'appliance_request_errors_total{code="worker_died",status="500"}' in page


@pytest.mark.starter
def test_build_and_memory_are_those_of_the_processes(daemon: LiveDaemon) -> None:
    version = appliance.__version__
    assert daemon.metric("appliance_build_info", version=version, model=MODEL, backend="cpu") == 1
    resident = daemon.worker().memory_info().rss
    assert 0.5 * resident < daemon.metric("appliance_worker_resident_memory_bytes") < 1.5 * resident
    total = int(re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1]) * 1024  # type: ignore[index]
    assert daemon.metric("appliance_host_memory_bytes") == total
    assert 0 < daemon.metric("appliance_host_memory_available_bytes") < total
