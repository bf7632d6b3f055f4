"""What is measured of a server, and the figures that come of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from appliance.bench.client import Answer, BenchClient

# Of a prompt whose beginning was seen before: what is new in it.
FRESH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes in tokens; `rounds` is how often everything is done."""

    rounds: int = 5
    prompt_tokens: int = 32
    output_tokens: int = 128
    prefill_tokens: int = 512
    prefix_tokens: int = 1024
    streams: tuple[int, ...] = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. Times in seconds, speeds in tokens a second; None where it says nothing.

    Attributes:
        prompt_tokens: of the median prompt.
        output_tokens: of all requests together.
        tokens_per_s: decode: one stream's, after its first token. prefill and prefix: prompt tokens by the time to the
            first token. streams: output tokens by the time from the first request to the last token.
        steady_tokens_per_s: output tokens a second while all of the streams had begun and none had ended.
        client_cpu_s: CPU time of this client, which may share the server's cores.
    """

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    steady_tokens_per_s: float | None
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_p99_s: float | None
    seconds: float
    client_cpu_s: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def decode_speed(answer: Answer) -> float:
    """Tokens a second after the first frame; 0 where there was no second one."""
    frames, span = len(answer.times), answer.times[-1] - answer.times[0]
    return answer.output_tokens * (frames - 1) / frames / span if span else 0.0


def steady_speed(answers: Sequence[Answer]) -> float | None:
    """Tokens a second of all streams together while each of them was decoding; None where that never was."""
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    if end <= begin:
        return None
    tokens = 0.0
    for answer in answers:
        inside = sum(begin < at <= end for at in answer.times)
        tokens += inside * answer.output_tokens / len(answer.times)
    return tokens / (end - begin)


class Bench:
    """Measures in order; `figures` grows with each that is complete, so that an interrupted run keeps them."""

    def __init__(self, client: BenchClient, plan: Plan, tell: Callable[[str], None]) -> None:
        self.figures: list[Figure] = []
        self._client = client
        self._plan = plan
        self._tell = tell

    async def run(self) -> None:
        """Raises BenchError as the client does."""
        plan = self._plan
        self._tell("decode")
        await self._decode()
        self._tell("prefill")
        await self._prefill()
        for streams in plan.streams:
            self._tell(f"{streams} streams")
            await self._concurrent(streams)
        if plan.prefix_tokens:
            self._tell("shared prefix")
            await self._shared_prefix()

    async def _decode(self) -> None:
        clock = _Clock()
        answers = [
            await self._ask(self._plan.prompt_tokens, self._plan.output_tokens)
            for _ in range(self._plan.rounds)
        ]
        self._add("decode", 1, answers, median(decode_speed(answer) for answer in answers), None, clock)

    async def _prefill(self) -> None:
        clock = _Clock()
        answers = [await self._ask(self._plan.prefill_tokens, 1) for _ in range(self._plan.rounds)]
        self._add("prefill", 1, answers, self._prompt_speed(answers, self._plan.prefill_tokens), None, clock)

    async def _concurrent(self, streams: int) -> None:
        clock = _Clock()
        answers: list[Answer] = []
        totals, steadies = [], []
        for _ in range(self._plan.rounds):
            asked = (self._ask(self._plan.prompt_tokens, self._plan.output_tokens) for _ in range(streams))
            crowd = await asyncio.gather(*asked)
            span = max(answer.times[-1] for answer in crowd) - min(answer.start for answer in crowd)
            totals.append(sum(answer.output_tokens for answer in crowd) / span)
            if (steady := steady_speed(crowd)) is not None:
                steadies.append(steady)
            answers += crowd
        steady = median(steadies) if steadies else None
        self._add("streams", streams, answers, median(totals), steady, clock)

    async def _shared_prefix(self) -> None:
        clock = _Clock()
        unseen: list[Answer] = []
        seen: list[Answer] = []
        size = self._plan.prefix_tokens
        for _ in range(self._plan.rounds):
            prefix = self._client.prompt(size)
            for answers in (unseen, seen):
                prompt = f"{prefix} {self._client.prompt(FRESH_TOKENS)}"
                answers.append(await self._client.complete(prompt, 1))
        for name, answers in (("prefix unseen", unseen), ("prefix seen", seen)):
            speed = self._prompt_speed(answers, size + FRESH_TOKENS)
            self._add(name, 1, answers, speed, None, clock)

    async def _ask(self, prompt_tokens: int, output_tokens: int) -> Answer:
        return await self._client.complete(self._client.prompt(prompt_tokens), output_tokens)

    @staticmethod
    def _prompt_speed(answers: Sequence[Answer], asked: int) -> float:
        return median((answer.prompt_tokens or asked) / answer.ttft for answer in answers)

    def _add(
        self,
        name: str,
        streams: int,
        answers: Sequence[Answer],
        speed: float,
        steady: float | None,
        clock: _Clock,
    ) -> None:
        first = [answer.ttft for answer in answers]
        gaps = [b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False)]
        ttft = [percentile(first, percent) for percent in (50, 95, 99)]
        itl = [percentile(gaps, percent) if gaps else None for percent in (50, 95, 99)]
        seconds, client_cpu_s = clock.read()
        figure = Figure(
            name=name,
            streams=streams,
            requests=len(answers),
            prompt_tokens=round(median(answer.prompt_tokens or 0 for answer in answers)),
            output_tokens=sum(answer.output_tokens for answer in answers),
            tokens_per_s=speed,
            steady_tokens_per_s=steady,
            ttft_p50_s=ttft[0],
            ttft_p95_s=ttft[1],
            ttft_p99_s=ttft[2],
            itl_p50_s=itl[0],
            itl_p95_s=itl[1],
            itl_p99_s=itl[2],
            seconds=seconds,
            client_cpu_s=client_cpu_s,
        )
        self.figures.append(figure)


class _Clock:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds and CPU seconds of this process since it was made."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu
