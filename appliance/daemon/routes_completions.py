"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.daemon import answers
from appliance.daemon.generation import Delta, completion_jobs
from appliance.daemon.schemas import parse_completion
from appliance.daemon.sse import EventStreamResponse, unless_client_leaves
from appliance.daemon.state import Daemon

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    arrived_at = time.monotonic()
    daemon: Daemon = request.app.state.daemon
    body = parse_completion(await request.body())
    jobs = await unless_client_leaves(completion_jobs(daemon, body, arrived_at), request.receive)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
    }
    if body.stream:
        return EventStreamResponse(
            answers.stream(daemon, jobs, head, _no_opening, _choices, body.wants_usage)
        )
    texts, last = await unless_client_leaves(answers.gather(daemon, jobs), request.receive)
    choices = [
        _choice(index, text, delta.finish_reason if delta else None)
        for index, (text, delta) in enumerate(zip(texts, last, strict=True))
    ]
    return JSONResponse({**head, "choices": choices, "usage": answers.usage(jobs, last)})


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _no_opening(_index: int) -> None:
    return None


def _choices(index: int, delta: Delta) -> list[dict[str, Any]]:
    return [_choice(index, delta.text, delta.finish_reason)]
