"""What both generation routes say alike: usage, whole answers, streams that may fail midway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from appliance.daemon import sse
from appliance.daemon.errors import report
from appliance.daemon.generation import Delta, Job, generate_all
from appliance.daemon.state import Daemon

Chunk = dict[str, Any]


def usage(jobs: Sequence[Job], last: Sequence[Delta | None]) -> Chunk:
    """OpenAI's usage object over all prompts; `last` holds the newest delta of each."""
    prompt = sum(len(job.prompt_ids) for job in jobs)
    completion = sum(delta.completion_tokens for delta in last if delta)
    cached = sum(delta.cached_tokens for delta in last if delta)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def gather(daemon: Daemon, jobs: Sequence[Job]) -> tuple[list[str], list[Delta | None]]:
    """The whole text of each job and its last delta."""
    texts = [""] * len(jobs)
    last: list[Delta | None] = [None] * len(jobs)
    async with aclosing(generate_all(daemon, jobs)) as deltas:
        async for index, delta in deltas:
            texts[index] += delta.text
            last[index] = delta
    return texts, last


async def stream(
    daemon: Daemon,
    jobs: Sequence[Job],
    head: Chunk,
    opening: Callable[[int], Chunk | None],
    choices: Callable[[int, Delta], list[Chunk]],
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Frames of a streamed answer; none before the first delta, so that early errors keep their status.

    Args:
        head: what every chunk carries.
        opening: the choice that precedes the first one of a job, if the route has such.
        choices: the choices that say what a delta says, one chunk each.
        with_usage: end with a chunk of token counts, and mention it in the others, as OpenAI does.
    """
    last: list[Delta | None] = [None] * len(jobs)
    extra = {"usage": None} if with_usage else {}
    began = False
    try:
        async with aclosing(generate_all(daemon, jobs)) as deltas:
            async for index, delta in deltas:
                first = opening(index) if last[index] is None else None
                last[index] = delta
                for choice in [*([first] if first else []), *choices(index, delta)]:
                    began = True
                    yield sse.frame({**head, "choices": [choice], **extra})
    except Exception as error:
        if not began:
            raise
        yield report(error, daemon.metrics).frame()
        return
    if with_usage:
        yield sse.frame({**head, "choices": [], "usage": usage(jobs, last)})
    yield sse.DONE
