"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.daemon import answers
from appliance.daemon.generation import Delta, chat_job
from appliance.daemon.schemas import parse_chat
from appliance.daemon.sse import EventStreamResponse, unless_client_leaves
from appliance.daemon.state import Daemon

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    arrived_at = time.monotonic()
    daemon: Daemon = request.app.state.daemon
    body = parse_chat(await request.body())
    job = await unless_client_leaves(chat_job(daemon, body, arrived_at), request.receive)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    if body.stream:
        chunk = {**head, "object": "chat.completion.chunk"}
        return EventStreamResponse(answers.stream(daemon, [job], chunk, _opening, _choices, body.wants_usage))
    texts, last = await unless_client_leaves(answers.gather(daemon, [job]), request.receive)
    message = {"role": "assistant", "content": texts[0], "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(last[0])}
    usage = answers.usage([job], last)
    return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})


def _reason(delta: Delta | None) -> str | None:
    return delta.finish_reason if delta else None


def _opening(index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _choices(index: int, delta: Delta) -> list[dict[str, Any]]:
    found = []
    if delta.text:
        content = {"content": delta.text}
        found.append({"index": index, "delta": content, "logprobs": None, "finish_reason": None})
    if delta.finish_reason:
        found.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason})
    return found
