"""What Prometheus scrapes: requests are counted here, engine figures are the workers' last heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import appliance
from appliance.daemon.worker import WorkerHandle

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """All of the daemon's metrics, in a registry of their own."""

    def __init__(self, workers: Callable[[], list[WorkerHandle]]) -> None:
        self._registry = registry = CollectorRegistry()
        self.prompt_tokens = Counter(
            "appliance_prompt_tokens", "Tokens of the prompts accepted", registry=registry
        )
        self.generated_tokens = Counter(
            "appliance_generated_tokens", "Tokens that came back from the engine", registry=registry
        )
        self.errors = Counter(
            "appliance_request_errors", "Requests that ended with an error", ["code"], registry=registry
        )
        self.first_token = Histogram(
            "appliance_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "appliance_inter_token_latency_seconds",
            "Between a request's tokens, after the first",
            buckets=INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "appliance_request_duration_seconds",
            "From a request's arrival to its end, whatever the end",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        build = Info("appliance_build", "Version of the daemon", registry=registry)
        build.info({"version": appliance.__version__})
        registry.register(_EngineCollector(workers))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Times one prompt's generation, from the request's arrival (seconds of `time.monotonic`)."""

    def __init__(self, metrics: Metrics, arrived_at: float) -> None:
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """`count` tokens came back just now."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token.observe(now - self._arrived_at)
        else:
            self._metrics.inter_token.observe((now - self._last) / count)
        self._metrics.generated_tokens.inc(count)
        self._last = now

    def ended(self) -> None:
        self._metrics.duration.observe(time.monotonic() - self._arrived_at)


class _EngineCollector(Collector):
    """Reads the workers' figures at the moment of the scrape."""

    def __init__(self, workers: Callable[[], list[WorkerHandle]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        workers = self._workers()
        stats = [worker.stats for worker in workers]
        yield _gauge("running", "Requests with rows in the engine's steps", sum(s.running for s in stats))
        yield _gauge("waiting", "Requests that wait for their first step", sum(s.waiting for s in stats))
        blocks = GaugeMetricFamily("appliance_kv_blocks", "Blocks of KV memory by state", labels=["state"])
        blocks.add_metric(["used"], sum(s.blocks_used for s in stats))
        blocks.add_metric(["cached"], sum(s.blocks_cached for s in stats))
        blocks.add_metric(["free"], sum(s.blocks_free for s in stats))
        yield blocks
        yield CounterMetricFamily(
            "appliance_prefix_cache_lookup_tokens",
            "Prompt tokens for which the prefix cache was asked",
            value=sum(s.prefix_lookup_tokens_total for s in stats),
        )
        yield CounterMetricFamily(
            "appliance_prefix_cache_hit_tokens",
            "Prompt tokens that the prefix cache had",
            value=sum(s.prefix_hit_tokens_total for s in stats),
        )
        yield CounterMetricFamily(
            "appliance_preemptions",
            "Running requests that gave their blocks to others",
            value=sum(s.preemptions_total for s in stats),
        )
        yield CounterMetricFamily(
            "appliance_worker_restarts",
            "Engine workers that were replaced because they died or hung",
            value=sum(worker.restarts for worker in workers),
        )


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"appliance_requests_{name}", help_text, value=value)
