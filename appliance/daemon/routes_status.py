"""GET /health, /ready and /metrics: for systemd, load balancers and Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from appliance.daemon.state import Daemon

# Load balancers and monitors often ask for the status alone.
PROBES = ["GET", "HEAD"]

router = APIRouter()


@router.api_route("/health", methods=PROBES)
async def health() -> Response:
    """The process lives, whatever the model does."""
    return JSONResponse({"status": "ok"})


@router.api_route("/ready", methods=PROBES)
async def ready(request: Request) -> Response:
    """200 when a request would be served now, else 503 and why not."""
    daemon: Daemon = request.app.state.daemon
    reason = daemon.not_ready
    if reason:
        loading = daemon.router.worker(daemon.model_name).loading
        return JSONResponse({"status": "not ready", "reason": reason, "loading": loading}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    daemon: Daemon = request.app.state.daemon
    return Response(daemon.metrics.render(), media_type=CONTENT_TYPE_LATEST)
