"""The ASGI application: guards outside, routes inside, every error in OpenAI's shape."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import appliance
from appliance.daemon import routes_chat, routes_completions, routes_models, routes_status
from appliance.daemon.cors import Cors
from appliance.daemon.errors import ErrorEdge, report
from appliance.daemon.gate import Gate
from appliance.daemon.guards import AccessGuard, BodyLimit
from appliance.daemon.state import Daemon


def build_app(daemon: Daemon) -> FastAPI:
    # The interactive documentation would load its scripts from elsewhere.
    app = FastAPI(
        title="appliance", version=appliance.__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.daemon = daemon
    for module in (routes_chat, routes_completions, routes_models, routes_status):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _http_error)
    # The last one added is the outermost.
    app.add_middleware(Gate, daemon=daemon)
    app.add_middleware(BodyLimit, max_bytes=daemon.settings.max_body_bytes)
    app.add_middleware(AccessGuard, settings=daemon.settings)
    app.add_middleware(ErrorEdge, metrics=daemon.metrics)
    # Outside of the errors too, so that an allowed page can read why it was refused.
    app.add_middleware(Cors, origins=daemon.settings.allowed_origins)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    daemon: Daemon = request.app.state.daemon
    return report(error, daemon.metrics).response()
