"""`Client`: one request as its client sees it, who knows what must come."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from appliance.engine.scheduler import Scheduler
from appliance.engine.types import TokenEvent
from sim.model import Beam, Candidate, Text, grow_beams, text_of, undisturbed, undisturbed_beams
from sim.traffic import Alive, Arrive, Settings


class Client:
    """Takes the events of a request and asserts that they are what an undisturbed run gives, each end once."""

    def __init__(self, arrival: Arrive, settings: Settings) -> None:
        self.arrival = arrival
        self.request = arrival.request
        self.is_over = False
        self.search = Search(arrival, settings) if arrival.beam_width else None
        limits = settings.limits
        continuations = range(0 if self.search else self.request.sampling.num_sequences)
        self._expected = {
            index: undisturbed(self.request, arrival.seed, index, settings.windows, limits.max_model_len)
            for index in continuations
        }
        self._num_produced: dict[int, int] = defaultdict(int)
        self._ended: dict[int, str] = {}
        self._scored: list[int] = []

    @property
    def num_continuations(self) -> int:
        return max(self.arrival.beam_width, self.request.sampling.num_sequences)

    def text(self, index: int) -> Text:
        """The text that a continuation is of."""
        return self.search.beams[index].text if self.search else self._expected[index][0]

    def alive(self) -> Alive:
        ongoing = [] if self.search else [i for i in sorted(self._num_produced) if i not in self._ended]
        return Alive(self.request.id, tuple(ongoing))

    def take(self, event: TokenEvent) -> None:
        """Take in news that nobody here has asked for: text, or an end that belongs to it."""
        if event.error is not None:  # of the whole request, whatever the index says
            assert not self.is_over, f"{event} follows the last one"
            assert event.is_last
            self.is_over = True
            return
        self._take(event)
        text, reason = self._expected.get(event.index, (self.text(event.index), None))
        assert event.finish_reason in (None, reason), f"{event} ends otherwise than {reason}"
        start = len(self.request.prompt_ids) + self._num_produced[event.index]
        self._num_produced[event.index] += len(event.token_ids)
        stop = start + len(event.token_ids)
        assert list(event.token_ids) == text.tokens[start:stop], f"{event} is not of the undisturbed text"
        assert event.finish_reason is None or stop == len(text.tokens), f"{event} ends too early"
        if self.search and event.logprobs:
            (position,) = event.logprobs
            self.search.said[event.index] = [(top.token_id, top.logprob) for top in position.top]

    def take_abort(self, event: TokenEvent) -> None:
        """Take in the end that a cancellation gives."""
        assert event.finish_reason == "abort"
        assert not event.token_ids
        self._take(event)

    def _take(self, event: TokenEvent) -> None:
        assert not self.is_over, f"{event} follows the last one"
        assert event.index not in self._ended, f"{event} follows the end of its continuation"
        self._scored += [each.token.token_id for each in event.prompt_logprobs]
        if event.finish_reason is not None:
            self._ended[event.index] = event.finish_reason
        if event.is_last:
            self.is_over = True
            is_whole = "abort" not in self._ended.values()
            if is_whole and self.request.sampling.prompt_logprobs is not None:
                assert self._scored == list(self.request.prompt_ids[1:]), "prompt tokens scored amiss"
            if is_whole and not self.search:
                assert self._ended.keys() == self._expected.keys(), f"{event} is the last before all ended"


@dataclass
class Search:
    """A beam search over a steered request."""

    arrival: Arrive
    settings: Settings
    said: dict[int, list[Candidate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beams = {0: Beam(text_of(self.arrival.request.prompt_ids))}
        self._waited = 0

    def is_ready(self) -> bool:
        """Whether every beam was heard, and the delay after that is over; asked once a step."""
        if self.said.keys() != self.beams.keys():
            return False
        self._waited += 1
        return self._waited > self.arrival.steering_delay

    def advance(self, scheduler: Scheduler) -> bool:
        """Go on with the best beams; False: the search is over."""
        prompt, width = self.arrival.request.prompt_ids, self.arrival.beam_width
        best = grow_beams(self.beams, self.said, width)
        length = len(best[0][1].text.tokens) - len(prompt)
        if length == self.arrival.beam_length:
            expected = undisturbed_beams(prompt, width, length, self.settings.windows)
            assert [beam.text.tokens for _, beam in best] == expected, (
                "not the beams of an undisturbed search"
            )
            return False
        choices = [(index, beam.text.tokens[-1]) for index, beam in best]
        indices = scheduler.steer(self.arrival.request.id, choices)
        assert len(set(indices)) == len(best), f"beams share indices: {indices}"
        self.beams = {index: beam for index, (_, beam) in zip(indices, best, strict=True)}
        self.said, self._waited = {}, 0
        return True
