"""What both generation routes say alike: usage, whole answers, streams that may fail midway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from appliance.daemon import sse
from appliance.daemon.generation import Job, generate_all
from appliance.daemon.state import Daemon
from appliance.engine.types import PositionLogprobs
from appliance.text.continuation import Delta, most_likely

Chunk = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One continuation, whole."""

    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.last = delta

    @property
    def finish_reason(self) -> str | None:
        return self.last.finish_reason if self.last else None


@dataclass(slots=True)
class Prompted:
    """All that was answered to one prompt; `answers` are those to return, best first where they were chosen."""

    job: Job
    answers: list[Answer]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)


def usage(jobs: Sequence[Job], last: Iterable[Delta | None]) -> Chunk:
    """OpenAI's usage object over all prompts; `last` holds the newest delta of each continuation."""
    deltas = [delta for delta in last if delta]
    prompt = sum(len(job.prompt_ids) for job in jobs)
    completion = sum(delta.num_tokens for delta in deltas)
    # Every continuation of a prompt tells the same.
    cached = sum(delta.num_cached_tokens for delta in deltas if delta.index == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def gather(daemon: Daemon, jobs: Sequence[Job]) -> tuple[list[Prompted], Chunk]:
    """The whole answers to each job, and the usage."""
    found = [Prompted(job, [Answer() for _ in range(job.sampling.num_sequences)]) for job in jobs]
    async with aclosing(generate_all(daemon, jobs)) as deltas:
        async for place, delta in deltas:
            found[place].answers[delta.index].add(delta)
            found[place].prompt_logprobs += delta.prompt_logprobs
    counts = usage(jobs, [answer.last for prompted in found for answer in prompted.answers])
    for prompted in found:
        wanted = prompted.job.sampling.n
        if len(prompted.answers) > wanted:
            prompted.answers = most_likely(prompted.answers, wanted)
    return found, counts


async def stream(
    daemon: Daemon,
    jobs: Sequence[Job],
    head: Chunk,
    opening: Callable[[int, int], Chunk | None],
    choices: Callable[[int, int, Delta], list[Chunk]],
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Frames of a streamed answer; none before the first delta, so that early errors keep their status.

    An error is raised; it is shown as a response, or as the last frame of a stream that has begun.

    Args:
        head: what every chunk carries.
        opening: for a job's place and a choice's index, the choice that precedes its first one, if the route has such.
        choices: for a job's place and a choice's index, the choices that say what a delta says, one chunk each.
        with_usage: end with a chunk of token counts, and mention it in the others, as OpenAI does.
    """
    last: dict[tuple[int, int], Delta] = {}
    extra = {"usage": None} if with_usage else {}
    async with aclosing(generate_all(daemon, jobs)) as deltas:
        async for place, delta in deltas:
            index = place * jobs[place].sampling.n + delta.index
            first = None if (place, delta.index) in last else opening(place, index)
            last[place, delta.index] = delta
            for choice in [*([first] if first else []), *choices(place, index, delta)]:
                yield sse.frame({**head, "choices": [choice], **extra})
    if with_usage:
        yield sse.frame({**head, "choices": [], "usage": usage(jobs, last.values())})
    yield sse.DONE
