"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.daemon import answers, logprobs
from appliance.daemon.answers import Answer
from appliance.daemon.generation import Job, chat_job
from appliance.daemon.parsing import parse_chat
from appliance.daemon.sse import EventStreamResponse, unless_client_leaves
from appliance.daemon.state import Daemon
from appliance.engine.types import PositionLogprobs
from appliance.text.continuation import Delta

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

        def choices(_place: int, index: int, delta: Delta) -> list[dict[str, Any]]:
            return _choices(job, index, delta)

        return EventStreamResponse(answers.stream(daemon, [job], chunk, _opening, choices, body.wants_usage))
    (prompted,), usage = await unless_client_leaves(answers.gather(daemon, [job]), request.receive)
    whole = [_whole(job, index, answer) for index, answer in enumerate(prompted.answers)]
    answer = {**head, "object": "chat.completion", "choices": whole, "usage": usage}
    if job.sampling.prompt_logprobs is not None:
        answer["prompt_logprobs"] = logprobs.prompt(job.model.tokenizer, prompted.prompt_logprobs)
    return JSONResponse(answer)


def _whole(job: Job, index: int, answer: Answer) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": _logprobs(job, answer.logprobs),
        "finish_reason": answer.finish_reason,
    }


def _opening(_place: int, index: int) -> dict[str, Any]:
    return _choice(index, {"role": "assistant", "content": "", "refusal": None})


def _choices(job: Job, index: int, delta: Delta) -> list[dict[str, Any]]:
    found = []
    if delta.text or delta.logprobs:
        found.append({**_choice(index, {"content": delta.text}), "logprobs": _logprobs(job, delta.logprobs)})
    if delta.finish_reason:
        found.append({**_choice(index, {}), "finish_reason": delta.finish_reason})
    return found


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(
    job: Job, positions: list[PositionLogprobs] | tuple[PositionLogprobs, ...]
) -> dict[str, Any] | None:
    return None if job.sampling.logprobs is None else logprobs.chat(job.model.tokenizer, positions)
