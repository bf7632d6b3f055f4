"""The engines' own figures for Prometheus: what their workers said in their last heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import appliance
from appliance.daemon.worker import WorkerHandle
from appliance.engine.stats import EngineStats


class EngineCollector(Collector):
    """Reads the workers' figures, and the machine's memory, at the moment of the scrape."""

    def __init__(self, workers: Callable[[], Mapping[str, WorkerHandle]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        workers = self._workers()
        yield _build(workers)
        stats = [worker.stats for worker in workers.values()]
        yield _gauge("requests_running", "Requests with rows in the engine's steps", _sum(stats, "running"))
        yield _gauge(
            "requests_waiting",
            "Requests that wait for their first step, or were preempted",
            _sum(stats, "waiting"),
        )
        yield from _kv_memory(stats)
        yield _counter(
            "prefix_cache_lookup_tokens",
            "Prompt tokens for which the prefix cache was asked",
            _sum(stats, "prefix_lookup_tokens_total"),
        )
        yield _counter(
            "prefix_cache_hit_tokens",
            "Prompt tokens that the prefix cache had",
            _sum(stats, "prefix_hit_tokens_total"),
        )
        preemptions = CounterMetricFamily(
            "appliance_preemptions",
            "Running requests that gave their blocks to others, by how they get them back",
            labels=["kind"],
        )
        preemptions.add_metric(["recompute"], _sum(stats, "preemptions_total"))
        yield preemptions
        yield _counter(
            "worker_restarts",
            "Engine workers that were replaced because they died or hung",
            sum(worker.restarts for worker in workers.values()),
        )
        yield _gauge(
            "worker_resident_memory_bytes", "RAM that the engine workers hold", _sum(stats, "rss_bytes")
        )
        memory = psutil.virtual_memory()
        yield _gauge("host_memory_bytes", "RAM of this machine", memory.total)
        yield _gauge(
            "host_memory_available_bytes",
            "RAM of this machine that programs could get without swapping",
            memory.available,
        )


def _build(workers: Mapping[str, WorkerHandle]) -> Metric:
    """One series a model; what only a loaded engine knows is "" before that."""
    family = InfoMetricFamily(
        "appliance_build",
        "Always 1; the labels say what runs here",
        labels=["version", "model", "backend", "native_isa"],
    )
    for model, worker in workers.items():
        backend, isa = (worker.info.backend, worker.info.native_isa) if worker.info else ("", "")
        family.add_metric([appliance.__version__, model, backend, isa], {})
    return family


def _kv_memory(stats: list[EngineStats]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "appliance_kv_blocks",
        "Blocks of KV memory by state: held by a request (used), findable by the prefix cache (cached), or neither",
        labels=["tier", "state"],
    )
    for state in ("used", "cached", "free"):
        blocks.add_metric(["device", state], _sum(stats, f"blocks_{state}"))
    yield blocks
    yield _gauge(
        "kv_block_bytes",
        "Size of a block of KV memory, the mean where layers differ",
        max((s.kv_block_bytes for s in stats), default=0),
    )


def _sum(stats: list[EngineStats], name: str) -> int:
    return sum(getattr(s, name) for s in stats)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"appliance_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"appliance_{name}", help_text, value=value)
