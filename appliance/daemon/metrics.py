"""What Prometheus scrapes. Requests are measured here; see `engine_metrics` for what the engine says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric

from appliance.daemon.engine_metrics import EngineCollector
from appliance.daemon.events import EventStream
from appliance.daemon.worker import WorkerHandle
from appliance.engine.types import TokenEvent

FINISH_REASONS = ("stop", "length", "abort", "error")

QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LENGTH_BUCKETS = tuple(2**power for power in range(18))


class Metrics:
    """All of the daemon's metrics, in a registry of their own.

    Args:
        workers: the workers by the names of their models, asked at every scrape.
    """

    def __init__(self, workers: Callable[[], Mapping[str, WorkerHandle]]) -> None:
        # Process-wide, and without it every counter comes with a second series that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of the prompts that the engine was given")
        self.generated_tokens = self._counter("generated_tokens", "Tokens that came back from the engine")
        self.requests = self._counter(
            "requests", "Prompts whose generation ended, by how the last continuation did", ["finish_reason"]
        )
        # A series that appears with its first event has no rate before the second one.
        for reason in FINISH_REASONS:
            self.requests.labels(reason)
        self.errors = self._counter(
            "request_errors",
            "HTTP requests that ended with an error, in a stream too, by its code and HTTP status",
            ["code", "status"],
        )
        self.queue = self._histogram(
            "request_queue_seconds",
            "From a request's arrival to its first step, or to its end if it had none",
            QUEUE_BUCKETS,
        )
        self.prefill = self._histogram(
            "request_prefill_seconds", "From a request's first step to its first token", TTFT_BUCKETS
        )
        self.decode = self._histogram(
            "request_decode_seconds", "From a request's first token to its last", DURATION_BUCKETS
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Between the tokens of a continuation, after its first",
            INTER_TOKEN_BUCKETS,
        )
        self.duration = self._histogram(
            "request_duration_seconds",
            "From a request's arrival to its end, whatever the end",
            DURATION_BUCKETS,
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompt", LENGTH_BUCKETS
        )
        self.generated_length = self._histogram(
            "request_generated_tokens",
            "Tokens of all continuations of a prompt when it ended",
            LENGTH_BUCKETS,
        )
        self._registry.register(EngineCollector(workers))
        ProcessCollector(registry=self._registry)

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"appliance_{name}", help_text, labels, registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"appliance_{name}", help_text, buckets=buckets, registry=self._registry)

    def families(self) -> list[Metric]:
        """Every metric as of now."""
        return list(self._registry.collect())

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Measures one prompt's generation, of however many continuations; `ended` once, whatever happened.

    Args:
        arrived_at: when the request came, on the clock of `time.monotonic`.
        num_prompt_tokens: the length of the prompt.
        events: what the engine answers; it knows when the first step began.
    """

    def __init__(
        self, metrics: Metrics, arrived_at: float, num_prompt_tokens: int, events: EventStream
    ) -> None:
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._events = events
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self._finish_reason = "abort"
        metrics.prompt_tokens.inc(num_prompt_tokens)
        metrics.prompt_length.observe(num_prompt_tokens)

    def saw(self, event: TokenEvent) -> None:
        """The engine said this just now."""
        if event.error is not None:
            self._finish_reason = "error"
        if event.token_ids:
            self._count(event.index, len(event.token_ids), time.monotonic())

    def finished(self, reason: str) -> None:
        """The last continuation has come to its end."""
        self._finish_reason = reason

    def ended(self) -> None:
        """Nothing more will come. Where it neither failed nor finished, the client has left."""
        metrics, now = self._metrics, time.monotonic()
        if self._first is None:
            metrics.queue.observe(self._began_at(now) - self._arrived_at)
        else:
            metrics.decode.observe(max(self._last.values()) - self._first)
        metrics.duration.observe(now - self._arrived_at)
        metrics.generated_length.observe(self._num_tokens)
        metrics.requests.labels(self._finish_reason).inc()

    def _count(self, index: int, num_tokens: int, now: float) -> None:
        metrics = self._metrics
        if self._first is None:
            self._first, began_at = now, self._began_at(now)
            metrics.queue.observe(began_at - self._arrived_at)
            metrics.prefill.observe(now - began_at)
            metrics.first_token.observe(now - self._arrived_at)
        if index in self._last:
            metrics.inter_token.observe((now - self._last[index]) / num_tokens)
        self._last[index] = now
        self._num_tokens += num_tokens
        metrics.generated_tokens.inc(num_tokens)

    def _began_at(self, now: float) -> float:
        """When the first step began; `now` if none has."""
        return now if self._events.began_at is None else self._events.began_at
