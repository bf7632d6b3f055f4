"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from appliance.daemon import answers, logprobs
from appliance.daemon.answers import Answer, Prompted
from appliance.daemon.generation import Job, completion_jobs
from appliance.daemon.parsing import parse_completion
from appliance.daemon.schemas import CompletionBody
from appliance.daemon.sse import EventStreamResponse, unless_client_leaves
from appliance.daemon.state import Daemon
from appliance.text.continuation import Delta

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
        chunks = _Chunks(body, jobs)
        frames = answers.stream(daemon, jobs, head, chunks.opening, chunks.choices, body.wants_usage)
        return EventStreamResponse(frames)
    found, usage = await unless_client_leaves(answers.gather(daemon, jobs), request.receive)
    choices = [_whole(body, prompted, answer) for prompted in found for answer in prompted.answers]
    numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
    return JSONResponse({**head, "choices": numbered, "usage": usage})


def _whole(body: CompletionBody, prompted: Prompted, answer: Answer) -> dict[str, Any]:
    tokenizer = prompted.job.model.tokenizer
    text, positions, first_id = answer.text, answer.logprobs, None
    if body.echo:
        text = tokenizer.decode(prompted.job.prompt_ids) + text
        positions, first_id = [*prompted.prompt_logprobs, *positions], prompted.job.prompt_ids[0]
    choice: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": answer.finish_reason}
    if body.logprobs is not None:
        choice["logprobs"] = logprobs.completion(tokenizer, positions, 0, first_id)
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = logprobs.prompt(tokenizer, prompted.prompt_logprobs)
    return choice


class _Chunks:
    """The choices of a streamed answer; remembers how much text each of them has."""

    def __init__(self, body: CompletionBody, jobs: list[Job]) -> None:
        self._body = body
        self._jobs = jobs
        self._length: dict[int, int] = defaultdict(int)

    def opening(self, place: int, index: int) -> dict[str, Any] | None:
        """The prompt, where it is to be echoed."""
        if not self._body.echo:
            return None
        job = self._jobs[place]
        text = job.model.tokenizer.decode(job.prompt_ids)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self._body.logprobs is not None:
            choice["logprobs"] = logprobs.completion(job.model.tokenizer, (), 0, job.prompt_ids[0])
            self._length[index] = len(choice["logprobs"]["tokens"][0])
        return choice

    def choices(self, place: int, index: int, delta: Delta) -> list[dict[str, Any]]:
        positions = [*(delta.prompt_logprobs if self._body.echo else ()), *delta.logprobs]
        if not (delta.text or positions or delta.finish_reason):
            return []
        choice = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._body.logprobs is not None:
            told = logprobs.completion(self._jobs[place].model.tokenizer, positions, self._length[index])
            self._length[index] += sum(map(len, told["tokens"]))
            choice["logprobs"] = told
        return [choice]
