"""Errors as the API shows them: `{"error": {"message", "type", "param", "code"}}`, never a traceback."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.daemon import sse
from appliance.daemon.metrics import Metrics
from appliance.daemon.router import UnknownModelError
from appliance.daemon.worker import WorkerUnavailableError
from appliance.engine.errors import ParameterError
from appliance.engine.types import ErrorInfo
from appliance.text.chat_template import NoTemplateError, TemplateError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5

_INTERNAL = "internal_error"
_STATUS_OF_ENGINE_CODE = {
    "context_length_exceeded": 400,
    "invalid_parameter": 400,
    "worker_died": 500,
    "step_failed": 500,
    "numerical_error": 500,
    _INTERNAL: 500,
    "request_timeout": 504,
    "shutting_down": 503,
    "model_unavailable": 503,
}


class ApiError(Exception):
    """An error to be shown to the client as it is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", str(RETRY_AFTER_S))

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)

    def frame(self) -> bytes:
        """The same error inside a stream that has begun."""
        return b"data: " + json.dumps(self.body, ensure_ascii=False).encode() + b"\n\n"


class EngineFailure(Exception):
    """A request's stream ended with an error."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def report(error: Exception, metrics: Metrics) -> ApiError:
    """What to show for `error`. It is counted; an unforeseen one is logged under an id that is shown."""
    shown = _translate(error)
    if shown is None:
        incident = uuid.uuid4().hex[:8]
        log.error("internal error %s", incident, exc_info=error)
        message = f"internal error {incident}; the daemon's log says more"
        shown = ApiError(500, message, code=_INTERNAL)
    metrics.errors.labels(shown.code, str(shown.status)).inc()
    return shown


def _translate(error: Exception) -> ApiError | None:
    match error:
        case ApiError():
            return error
        case ParameterError():
            return ApiError(400, str(error), code=error.code, param=error.param)
        case NoTemplateError():
            return ApiError(400, str(error), code="no_chat_template", param="messages")
        case TemplateError():
            return ApiError(400, str(error), code="template_error", param="messages")
        case UnknownModelError():
            return ApiError(404, str(error), code=error.code, param="model")
        case WorkerUnavailableError():
            return ApiError(503, str(error), code=error.code)
        case EngineFailure(info=info):
            status = _STATUS_OF_ENGINE_CODE.get(info.code, 500)
            return ApiError(status, info.message, code=info.code)
        case HTTPException(status_code=404):
            return ApiError(404, "no such route; the API is under /v1", code="unknown_url")
        case HTTPException():
            return ApiError(error.status_code, error.detail, code="http_error", headers=error.headers)
    return None


class ErrorEdge:
    """ASGI middleware: an exception becomes a response.

    If one has begun, it becomes the last frame where that is an event stream; otherwise the connection is cut.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        # A series that appears with its first event has no rate before the second one: alerts would sleep on.
        for code, status in _STATUS_OF_ENGINE_CODE.items():
            if status >= 500:
                metrics.errors.labels(code, str(status))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = streams = False

        async def watched_send(message: Message) -> None:
            nonlocal began, streams
            if message["type"] == "http.response.start":
                began, streams = True, (b"content-type", sse.MEDIA_TYPE) in message["headers"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnect:
            return
        except Exception as error:
            shown = report(error, self._metrics)
            if not began:
                await shown.response()(scope, receive, send)
            elif streams:
                await send({"type": "http.response.body", "body": shown.frame(), "more_body": False})
