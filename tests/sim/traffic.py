"""Random settings and random traffic, from one seed each; and traffic that was noted down, to be had again."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from appliance.engine.memory import GroupNeed, plan_memory
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.scheduler import SchedulerLimits
from appliance.engine.types import Request
from sim.model import EOS, VOCAB

WINDOWS = ((0,), (0,), (0, 5), (0, 9, 40), (7,), (0, 1), (0, 24))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of an engine, and of what is asked of it.

    Attributes:
        steers: beam searches are among the requests.
        forks: there are many searches and continuations, in little memory.
    """

    block_size: int
    windows: tuple[int, ...]
    num_blocks: tuple[int, ...]
    limits: SchedulerLimits
    caching: bool
    steers: bool
    forks: bool


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request; with a `beam_width` it is steered, `steering_delay` steps after all beams have been heard."""

    request: Request
    seed: int
    beam_width: int = 0
    beam_length: int = 0
    steering_delay: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client goes away, or wants no more of one continuation."""

    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Spoil:
    """From now on the model computes of a request what is not a number."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Break:
    """The whole next step fails."""


Action = Arrive | Cancel | Spoil | Break


@dataclass(frozen=True, slots=True)
class Alive:
    """A request that lives, as its client sees it: its continuations that have produced something and not ended."""

    request_id: str
    producing: tuple[int, ...]


class Traffic(Protocol):
    """Where a step's actions come from."""

    def actions(self, step: int, alive: Many[Alive], texts: Many[Many[int]]) -> list[Action]:
        """What happens before a step; `texts` are some that were produced before."""


def make_settings(seed: int) -> Settings:
    """Of every 8 seeds one has long texts in blocks of 16, to measure waste by, and two have many forks."""
    rng = random.Random(f"settings {seed}")
    is_long, forks = seed % 8 == 7, seed % 8 in (2, 5)
    block_size = 16 if is_long else rng.choice((1, 2, 4, 4, 8, 16))
    windows = (0,) if is_long else rng.choice(WINDOWS)
    max_num_seqs = rng.randint(2, 8) if is_long else rng.randint(8 if forks else 1, 12)
    token_budget = max_num_seqs + rng.randint(0, 4 * block_size)
    context = 1024 if is_long else rng.randint(8, 160)
    num_blocks = len(windows) * max(3, int(context * rng.uniform(0.8, 1.2 if forks else 3)) // block_size)
    plan = plan_memory(
        free_bytes=num_blocks,
        groups=[GroupNeed(1, window) for window in windows],
        block_size=block_size,
        chunk=token_budget,
        model_context_len=context,
        max_model_len=None,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=num_blocks,
    )
    return Settings(
        block_size=block_size,
        windows=windows,
        num_blocks=plan.num_blocks,
        limits=SchedulerLimits(max_num_seqs, token_budget, plan.max_model_len, frozenset({EOS})),
        caching=rng.random() < 0.75,
        steers=forks or rng.random() < 0.4,
        forks=forks,
    )


class RandomTraffic:
    """Bursts and lulls of requests, cancellations and failures, from a seed."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self._rng = random.Random(f"traffic {seed}")
        self._settings = settings
        self._prefixes = [self._tokens(settings.limits.max_model_len) for _ in range(3)]
        self._num_arrived = 0
        # Among long texts a few short ones would make the waste seem large.
        self._is_long = settings.limits.max_model_len >= 1000
        self._lull_until = 0
        self._load = 0.0

    def actions(self, step: int, alive: Many[Alive], texts: Many[Many[int]]) -> list[Action]:
        rng, actions = self._rng, list[Action]()
        if step % 100 == 0:
            self._load = rng.choice((0.02, 0.1, 0.3, 0.7))
            self._lull_until = step + 100 * (rng.random() < 0.1)
        most = 2 * self._settings.limits.max_num_seqs + 4
        while step >= self._lull_until and len(alive) + len(actions) < most and rng.random() < self._load:
            actions.append(self._arrival(step, texts))
        if alive and rng.random() < 0.03:
            leaver = rng.choice(alive)
            whole = not leaver.producing or rng.random() < 0.5
            actions.append(Cancel(leaver.request_id, None if whole else rng.choice(leaver.producing)))
        if alive and rng.random() < 0.01:
            actions.append(Spoil(rng.choice(alive).request_id))
        if rng.random() < 0.002:
            actions.append(Break())
        return actions

    def _arrival(self, step: int, texts: Many[Many[int]]) -> Arrive:
        rng = self._rng
        self._num_arrived += 1
        prompt = self._prompt(texts)
        room = self._settings.limits.max_model_len - len(prompt)
        is_steered = self._settings.steers and rng.random() < (0.5 if self._settings.forks else 0.2)
        width = rng.randint(1, 6 if self._settings.forks else 3) if is_steered else 0
        sampling = (
            SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=2 * width)
            if is_steered
            else self._sampling()
        )
        request = Request(
            id=str(self._num_arrived),
            prompt_ids=tuple(prompt),
            sampling=sampling,
            # Now and then the clock jumps.
            arrived_at=float(step if rng.random() < 0.98 else rng.randint(0, 2 * step)),
            priority=rng.choice((0, 0, 0, 1, 2, -1)),
            is_steered=is_steered,
        )
        length, delay = rng.randint(1, min(room, 12)), rng.choice((0, 0, 1, 5))
        return Arrive(request, rng.getrandbits(63), width, length * is_steered, delay * is_steered)

    def _prompt(self, texts: Many[Many[int]]) -> list[int]:
        """From one token to all that fits; often it begins as others do, or goes on with what was produced."""
        rng, longest = self._rng, self._settings.limits.max_model_len - 1
        typical = longest // 2 if self._is_long else longest // 5
        length = rng.choice((1, longest, *(rng.randint(1, max(1, typical)) for _ in range(5))))
        begins = rng.random()
        if texts and begins < 0.3:
            known = list(rng.choice(texts))
            return (known + self._tokens(rng.randint(1, 9)))[:longest]
        shared = rng.choice(self._prefixes)[: rng.randint(0, length)] if begins < 0.8 else []
        return shared + self._tokens(length - len(shared))

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        max_tokens = rng.choice((None, None, 1, rng.randint(2, 40), rng.randint(2, 40)))
        if rng.random() < 0.02:
            max_tokens = 0
        min_tokens = rng.choice((0, 0, 0, 5))
        return SamplingParams(
            n=rng.choice((1, 2, 4) if self._settings.forks else (1, 1, 1, 2, 4)),
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=tuple(self._tokens(rng.choice((0, 0, 3)))),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 1.0)),
            prompt_logprobs=rng.choice((None,) * 9 + (1,)),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(count)]


class NotedTraffic:
    """What happened before each step, as it was noted down."""

    def __init__(self, notes: Many[tuple[int, Action]]) -> None:
        self._by_step: dict[int, list[Action]] = {}
        for step, action in notes:
            self._by_step.setdefault(step, []).append(action)

    def actions(self, step: int, alive: Many[Alive], texts: Many[Many[int]]) -> list[Action]:  # noqa: ARG002
        return self._by_step.get(step, [])
