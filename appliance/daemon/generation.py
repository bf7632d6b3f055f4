"""From a checked request to text: tokenise, submit, detokenise. Streamed or not, all comes from here."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from appliance.daemon.errors import EngineFailure, bad_request
from appliance.daemon.metrics import RequestTimer
from appliance.daemon.schemas import ChatBody, CompletionBody, check_token_ids
from appliance.daemon.state import Daemon, ServedModel
from appliance.engine.errors import ContextLengthError
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import ErrorInfo, Request
from appliance.text.continuation import Continuation, Delta


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to continue. `arrived_at` is on the clock of `time.monotonic`, which the worker shares."""

    model: ServedModel
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    arrived_at: float


async def chat_job(daemon: Daemon, body: ChatBody, arrived_at: float) -> Job:
    """Raises ApiError, ParameterError, TemplateError: all the client's to mend."""
    model = await daemon.model(body.model, arrived_at)
    sampling = body.sampling(model.info, model.sampling)

    def encode() -> Sequence[int]:
        text = model.template.render([message.for_template() for message in body.messages])
        _check_text(model, text)
        # The template writes the beginning-of-sequence token itself where the model wants one.
        return model.tokenizer.encode(text, parse_special=True, add_bos=False)

    ids = await asyncio.to_thread(encode)
    return _job(model, ids, sampling, body.priority, arrived_at, "messages")


async def completion_jobs(daemon: Daemon, body: CompletionBody, arrived_at: float) -> list[Job]:
    """One job per prompt. Raises ApiError, ParameterError: the client's to mend."""
    model = await daemon.model(body.model, arrived_at)
    sampling = body.sampling(model.info, model.sampling)
    jobs = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            _check_text(model, prompt)
            ids: Sequence[int] = await asyncio.to_thread(model.tokenizer.encode, prompt, parse_special=True)
        else:
            _check_length(model, len(prompt))
            check_token_ids(prompt, model.info.vocab_size, "prompt")
            ids = prompt
        jobs.append(_job(model, ids, sampling, body.priority, arrived_at, "prompt"))
    return jobs


def _check_text(model: ServedModel, text: str) -> None:
    """Raises ApiError: the text is too long for the context, whatever its tokens. Encoding it takes time, this none."""
    limit = model.info.max_model_len
    least = -(-len(text.encode("utf-8", "replace")) // model.tokenizer.longest_token_bytes)
    if least >= limit:
        raise bad_request(
            f"the prompt has at least {least} tokens, but this model serves a context of {limit} tokens",
            "prompt",
            ContextLengthError.code,
        )


def _check_length(model: ServedModel, prompt_tokens: int) -> None:
    if prompt_tokens >= model.info.max_model_len:
        raise ContextLengthError(prompt_tokens, model.info.max_model_len)


def _job(
    model: ServedModel,
    ids: Sequence[int],
    sampling: SamplingParams,
    priority: int | None,
    arrived_at: float,
    param: str,
) -> Job:
    if not ids:
        raise bad_request(f"{param}: the prompt is empty", param)
    _check_length(model, len(ids))
    return Job(model, tuple(ids), sampling, priority or 0, arrived_at)


async def generate(daemon: Daemon, job: Job) -> AsyncGenerator[Delta, None]:
    """Continue a prompt. Closing the generator, or cancelling its consumer, frees what the request holds.

    Raises:
        EngineFailure: the engine ended it with an error, the daemon is shutting down, or time ran out.
        WorkerUnavailableError: no worker takes requests.
    """
    tokenizer, sampling = job.model.tokenizer, job.sampling
    request = Request(
        id=uuid.uuid4().hex,
        prompt_ids=job.prompt_ids,
        sampling=sampling,
        priority=job.priority,
        arrived_at=job.arrived_at,
        bad_sequences=tokenizer.spellings(sampling.bad_words),
    )
    events = daemon.router.submit(job.model.name, request)
    expiry = _expire(daemon, job, request.id)
    timer = RequestTimer(daemon.metrics, job.arrived_at, len(job.prompt_ids), events)
    continuations = [Continuation(index, tokenizer, sampling) for index in range(sampling.num_sequences)]
    num_going = len(continuations)
    try:
        async for event in events:
            timer.saw(event)
            if event.error is not None:
                raise EngineFailure(event.error)
            delta = continuations[event.index].take(event)
            if delta is None:  # it was stopped here, and the engine did not know yet
                continue
            if delta.finish_reason is not None:
                num_going -= 1
                if num_going == 0:
                    timer.finished(delta.finish_reason)
                if event.finish_reason is None:
                    daemon.router.abort_one(job.model.name, request.id, event.index)
            yield delta
            if num_going == 0:
                return
    finally:
        expiry.cancel()
        daemon.router.abort(job.model.name, request.id)
        timer.ended()


def _expire(daemon: Daemon, job: Job, request_id: str) -> asyncio.TimerHandle:
    limit = daemon.settings.request_timeout
    error = ErrorInfo("request_timeout", f"the request took longer than {limit:g} s (request_timeout)")
    left = job.arrived_at + limit - time.monotonic()
    return asyncio.get_running_loop().call_later(left, daemon.router.abort, job.model.name, request_id, error)


async def generate_all(daemon: Daemon, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Continue several prompts at once: (index of the job, delta), in the order in which they come.

    The first error ends all of them and is raised.
    """
    news: asyncio.Queue[tuple[int, Delta | None, BaseException | None]] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        try:
            async with aclosing(generate(daemon, job)) as deltas:
                async for delta in deltas:
                    news.put_nowait((index, delta, None))
        except Exception as error:
            news.put_nowait((index, None, error))
        else:
            news.put_nowait((index, None, None))

    tasks = [asyncio.create_task(pump(index, job)) for index, job in enumerate(jobs)]
    running = len(tasks)
    try:
        while running:
            index, delta, error = await news.get()
            if error is not None:
                raise error
            if delta is None:
                running -= 1
            else:
                yield index, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
