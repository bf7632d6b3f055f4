"""Which requests survive a worker's death, and how soon the next worker starts."""

from __future__ import annotations

import asyncio

from appliance.daemon.backoff import WINDOW_S, Backoff
from appliance.daemon.events import EventStream, Flights
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import ErrorInfo, Request, TokenEvent

DIED = ErrorInfo("worker_died", "it died")


def request(name: str) -> Request:
    return Request(id=name, prompt_ids=(1,), sampling=SamplingParams(), arrived_at=0.0)


def ending(stream: EventStream) -> str | None:
    """How the stream ended: the code of its error, its reason, or None while it goes on."""

    async def drain() -> str | None:
        end = None
        while not stream._queue.empty():
            event = await anext(stream)
            end = event.error.code if event.error else event.finish_reason
        return end

    return asyncio.run(drain())


def test_a_death_ends_what_was_in_its_step_or_had_produced_and_keeps_the_rest_once() -> None:
    flights = Flights()
    streams = {name: flights.open(request(name)).stream for name in ("in step", "produced", "waiting")}
    for flight in flights.unsent():
        flight.sent = True
    streams["unsent"] = flights.open(request("unsent")).stream
    flights.deliver(TokenEvent(request_id="produced", token_ids=(5,)))

    flights.survive_death(frozenset({"in step", "someone long gone"}), DIED)

    ends = {name: ending(stream) for name, stream in streams.items()}
    assert ends == {"in step": "worker_died", "produced": "worker_died", "waiting": None, "unsent": None}
    assert [flight.request.id for flight in flights.unsent()] == ["waiting", "unsent"]

    for flight in flights.unsent():
        flight.sent = True
    flights.survive_death(frozenset(), DIED)
    assert ending(streams["waiting"]) == "worker_died"
    assert [flight.request.id for flight in flights.unsent()] == ["unsent"]


def test_an_aborted_request_hears_nothing_more() -> None:
    flights = Flights()
    stream = flights.open(request("a")).stream
    assert flights.abort("a", None) is not None
    flights.deliver(TokenEvent(request_id="a", token_ids=(5,)))
    flights.deliver(TokenEvent(request_id="a", finish_reason="abort"))
    flights.fail_all(DIED)

    async def everything() -> list[str | None]:
        return [event.finish_reason async for event in stream]

    assert asyncio.run(everything()) == ["abort"]
    assert flights.abort("a", None) is None


def test_delays_double_until_the_breaker_opens() -> None:
    backoff, delays = Backoff(), []
    for now in range(4):
        backoff.record_death(float(now), lived_s=0.5)
        delays.append(backoff.delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0]
    assert not backoff.is_open
    backoff.record_death(5.0, lived_s=0.5)
    assert backoff.is_open
    assert backoff.delay_s == WINDOW_S


def test_deaths_far_apart_never_open_the_breaker() -> None:
    backoff = Backoff()
    for number in range(20):
        backoff.record_death(number * (WINDOW_S + 1), lived_s=WINDOW_S)
        assert (backoff.is_open, backoff.delay_s) == (False, 0.5)


def test_an_open_breaker_closes_only_after_a_long_life() -> None:
    backoff = Backoff()
    for now in range(5):
        backoff.record_death(float(now), lived_s=0.5)
    backoff.record_death(1000.0, lived_s=0.5)
    assert backoff.is_open
    backoff.record_death(3000.0, lived_s=WINDOW_S + 1)
    assert (backoff.is_open, backoff.delay_s) == (False, 0.5)
