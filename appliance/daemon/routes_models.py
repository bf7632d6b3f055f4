"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.daemon.router import UnknownModelError
from appliance.daemon.state import Daemon

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_describe(request.app.state.daemon)]})


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Response:
    daemon: Daemon = request.app.state.daemon
    if not daemon.is_called(name):
        raise UnknownModelError(name, [daemon.model_name])
    return JSONResponse(_describe(daemon))


def _describe(daemon: Daemon) -> dict[str, Any]:
    """OpenAI's model object with the limits that are in force; what the engine decides is null until it is loaded."""
    worker = daemon.router.worker(daemon.model_name)
    info = worker.info
    return {
        "id": daemon.model_name,
        "object": "model",
        "created": daemon.created,
        "owned_by": "appliance",
        "loading": worker.loading,
        "max_model_len": info.max_model_len if info else None,
        "max_num_seqs": daemon.settings.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens if info else None,
    }
