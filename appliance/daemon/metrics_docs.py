"""The documentation of the metrics, made from the registry.

`python -m appliance.daemon.metrics_docs` writes `docs/metrics.md`.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics_core import Metric

from appliance.daemon.metrics import Metrics
from appliance.daemon.worker import WorkerHandle
from appliance.engine.config import EngineConfig

_HEAD = """\
# Metrics

<!-- Made from the registry by `python -m appliance.daemon.metrics_docs`: change it there. -->

`GET /metrics`, in Prometheus's text format; with keys, it needs one. [deploy](deploy/README.md) has a scrape
configuration, alert rules and a dashboard.

Times are from a request's arrival at the daemon, so what a proxy adds is not in them. Where a request names several
prompts, each is measured as a request. Figures of the engine are at most a quarter of a second old; its totals
go on where they were when a worker is replaced, and all begin at 0 with the daemon. A histogram has the series
`_bucket`, `_sum` and `_count`.

| metric | type | labels | what |
|-|-|-|-|
"""


def table() -> str:
    """`docs/metrics.md`."""
    return _HEAD + "".join(_row(family) for family in sorted(_families(), key=_order))


def _families() -> list[Metric]:
    # The labels are found in samples, so there has to be one of each: a model that isn't loaded, an error.
    worker = WorkerHandle(EngineConfig(model_path=""))
    metrics = Metrics(lambda: {"model": worker})
    metrics.errors.labels("code", "status")
    return metrics.families()


def _order(family: Metric) -> tuple[bool, str]:
    """Ours first."""
    return (not family.name.startswith("appliance_"), family.name)


def _row(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
    cells = (f"`{family.name}{suffix}`", family.type, ", ".join(f"`{label}`" for label in labels))
    return f"| {' | '.join(cells)} | {family.documentation.rstrip('.')} |\n"


if __name__ == "__main__":
    Path("docs/metrics.md").write_text(table(), encoding="utf-8")
