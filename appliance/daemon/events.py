"""What the daemon hears of one request: a stream that ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.engine.types import ErrorInfo, Request, TokenEvent


class EventStream:
    """An async iterator of a request's events; one that `is_last` is always sent, and nothing after it.

    Events are a few token ids each, so a slow reader costs little memory and the engine never waits for it.

    Attributes:
        began_at: when the request's first step began, on the clock of `time.monotonic`; None before that.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._closed = False
        self._exhausted = False
        self.began_at: float | None = None

    def push(self, event: TokenEvent) -> None:
        assert not self._closed, "an event after the terminal one"
        self._closed = event.is_last
        self._queue.put_nowait(event)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._exhausted:
            raise StopAsyncIteration
        event = await self._queue.get()
        self._exhausted = event.is_last
        return event


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way through a worker.

    Attributes:
        sent: the living worker has been told of it.
        produced: at least one token came back.
        replayed: a worker died under it before it had produced anything, and it was kept.
    """

    request: Request
    stream: EventStream
    sent: bool = False
    produced: bool = False
    replayed: bool = False

    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> None:
        self.stream.push(
            TokenEvent(request_id=self.request.id, finish_reason=finish_reason, is_last=True, error=error),
        )


class Flights:
    """The requests that have not ended, by id. Whatever leaves has had its terminal event."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def open(self, request: Request) -> Flight:
        assert request.id not in self._flights, f"request id {request.id} is taken"
        flight = self._flights[request.id] = Flight(request, EventStream())
        return flight

    def step_began(self, request_ids: Iterable[str], now: float) -> None:
        """A step with rows of these requests begins."""
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None and flight.stream.began_at is None:
                flight.stream.began_at = now

    def deliver(self, event: TokenEvent) -> None:
        """Hand an event on. One of a request that has ended here (it was aborted) is dropped."""
        flight = self._flights.get(event.request_id)
        if flight is None:
            return
        flight.produced = flight.produced or bool(event.token_ids)
        if event.is_last:
            del self._flights[event.request_id]
        flight.stream.push(event)

    def abort(self, request_id: str, error: ErrorInfo | None) -> Flight | None:
        """End a request with reason "abort", or with `error`; None if it has ended already."""
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            flight.end("error" if error else "abort", error)
        return flight

    def fail_all(self, error: ErrorInfo) -> None:
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.end("error", error)

    def survive_death(self, in_step: frozenset[str], error: ErrorInfo) -> None:
        """A worker died while the requests `in_step` were in its step.

        Those, and the ones that had produced tokens, end with `error`: part of the answer may be with the
        client already, and a request that kills workers must not kill the next one. Others are kept, once.
        """
        for request_id, flight in list(self._flights.items()):
            if flight.sent and (request_id in in_step or flight.produced or flight.replayed):
                del self._flights[request_id]
                flight.end("error", error)
            elif flight.sent:
                flight.sent, flight.replayed = False, True

    def unsent(self) -> list[Flight]:
        """In order of arrival, those that the living worker has not been told of."""
        return [flight for flight in self._flights.values() if not flight.sent]
