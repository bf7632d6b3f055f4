"""Supervision of one engine worker: start it, hand on its events, notice its death, start it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq.asyncio

from appliance.daemon.backoff import Backoff
from appliance.daemon.events import EventStream, Flights
from appliance.daemon.process import WorkerProcess
from appliance.engine.config import EngineConfig, EngineInfo
from appliance.engine.protocol import (
    Abort,
    Events,
    FromWorker,
    Heartbeat,
    LoadFailed,
    Loading,
    Ready,
    StepBegan,
    Submit,
)
from appliance.engine.stats import EngineStats
from appliance.engine.types import ErrorInfo, Request

# Heartbeats come several times a second, though not within a step. One that takes longer than this is no longer
# "at once"; one that takes `HANG_S` never ends.
SILENT_S = 10.0
HANG_S = 60.0
WATCH_S = 5.0
# Without news of a weight that was read. A large model on a slow disk takes longer, but there is news.
LOAD_TIMEOUT_S = 600.0

log = logging.getLogger(__name__)


class WorkerUnavailableError(Exception):
    """No request can be taken: the worker could not be loaded, or it died too often; the message says why."""

    code = "model_unavailable"


def _unheard(_share: float) -> None:
    """Nobody wants to know."""


class WorkerHandle:
    """The worker of one model. It outlives the processes: requests are taken even while a new one loads.

    Attributes:
        info: what the engine said of itself when it last loaded; None before it first has.
        loading: the share of the weights that the starting worker has read; None while none is starting.
        restarts: how many times a dead or hung worker was replaced.
        unavailable: why no request is taken, "" if they are.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._flights = Flights()
        self._process: WorkerProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._in_step: frozenset[str] = frozenset()
        self._stats = EngineStats()
        self._past = EngineStats()
        self._heard_at = 0.0
        self._ready_at = 0.0
        self.info: EngineInfo | None = None
        self.loading: float | None = None
        self.restarts = 0
        self.unavailable = ""

    @property
    def not_ready(self) -> str:
        """Why a request would not be served at once; "" if it would."""
        if self.unavailable:
            return self.unavailable
        if self._process is None:
            return "the engine worker is being restarted"
        silence_s = time.monotonic() - self._heard_at
        return f"the engine worker has been silent for {silence_s:.0f} s" if silence_s > SILENT_S else ""

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def stats(self) -> EngineStats:
        """Gauges of the living process; totals over all of its lives, so that they never fall."""
        changes = {name: getattr(self._past, name) + getattr(self._stats, name) for name in _TOTALS}
        held = len(self._flights.unsent())
        return msgspec.structs.replace(self._stats, waiting=self._stats.waiting + held, **changes)

    async def start(self, progress: Callable[[float], None] = _unheard) -> EngineInfo:
        """Load the model and keep it loaded from now on.

        Args:
            progress: told the share of the weights that are read, several times a second.

        Raises:
            WorkerUnavailableError: it could not be loaded; it has not been tried again.
        """
        try:
            info = await self._launch(progress)
        except WorkerUnavailableError as error:
            self.refuse(str(error))
            raise
        self._supervisor = asyncio.create_task(self._supervise())
        return info

    def submit(self, request: Request) -> EventStream:
        """Raises WorkerUnavailableError; otherwise the stream ends with exactly one terminal event."""
        if self.unavailable:
            raise WorkerUnavailableError(self.unavailable)
        flight = self._flights.open(request)
        self._send_unsent()
        return flight.stream

    def abort(self, request_id: str, error: ErrorInfo | None = None) -> None:
        """End a request as "abort", or with `error`: here at once, in the worker before its next step."""
        flight = self._flights.abort(request_id, error)
        if flight is not None and flight.sent and self._process is not None:
            self._process.send(Abort(request_id=request_id))

    def abort_one(self, request_id: str, index: int) -> None:
        """End one continuation of a request that goes on, in the worker before its next step."""
        if self._process is not None:
            self._process.send(Abort(request_id=request_id, index=index))

    def fail_all(self, error: ErrorInfo) -> None:
        """End every request with `error`."""
        self._flights.fail_all(error)

    def refuse(self, reason: str) -> None:
        """Take no more requests, and end those that wait."""
        self.unavailable = reason
        self._flights.fail_all(ErrorInfo(WorkerUnavailableError.code, reason))

    async def stop(self) -> None:
        """End the process and wait for it: its memory is back when this returns."""
        self.refuse("the model is being unloaded")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._process is not None:
            await self._process.stop()
            self._process = None
        self._context.term()

    async def _launch(self, progress: Callable[[float], None]) -> EngineInfo:
        try:
            process = await WorkerProcess.launch(self._context, self._config)
        except OSError as error:
            raise WorkerUnavailableError(f"the engine worker could not be started: {error}") from error
        self.loading = 0.0
        try:
            info = await self._await_ready(process, progress)
        except BaseException:
            process.kill()
            await process.close()
            raise
        finally:
            self.loading = None
        log.info("engine worker %d is ready", process.pid)
        self._process, self.info = process, info
        self._heard_at = self._ready_at = time.monotonic()
        self._in_step = frozenset()
        self.unavailable = ""
        self._send_unsent()
        return info

    async def _await_ready(self, process: WorkerProcess, progress: Callable[[float], None]) -> EngineInfo:
        while True:
            try:
                message = await process.receive(LOAD_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise WorkerUnavailableError(
                    f"the engine worker came no further with loading the model for {LOAD_TIMEOUT_S:g} s"
                ) from None
            match message:
                case Loading(done=done, total=total):
                    self.loading = round(done / total, 3)
                    progress(self.loading)
                case Ready(info=info):
                    return info
                case LoadFailed(error=error):
                    raise WorkerUnavailableError(error.message)
                case None:
                    raise WorkerUnavailableError(
                        f"the engine worker {process.ending} while it loaded the model"
                    )

    async def _supervise(self) -> None:
        try:
            await self._keep_one_alive()
        except Exception:
            # A bug of ours. Requests must hear of it all the same, instead of waiting for ever.
            log.exception("the supervision of the engine worker failed")
            self.refuse("the supervision of the engine worker failed; restart the daemon, its log says more")

    async def _keep_one_alive(self) -> None:
        while True:
            if self._process is not None:
                await self._listen(self._process)
                await self._bury(self._process)
            await asyncio.sleep(self._backoff.delay_s)
            try:
                await self._launch(_unheard)
            except WorkerUnavailableError as error:
                log.error("%s", error)
                self._note_death(str(error), lived_s=0.0)
            else:
                self.restarts += 1

    async def _listen(self, process: WorkerProcess) -> None:
        """Hand on what the worker says until it is dead; kill it once it has said nothing for `HANG_S`."""
        # Counted in waits that were in vain, not by the clock: we may have been stopped ourselves.
        silent_s = 0.0
        while True:
            try:
                message = await process.receive(WATCH_S)
            except asyncio.TimeoutError:
                silent_s += WATCH_S
                if silent_s >= HANG_S:
                    log.error(
                        "engine worker %d has been silent for %.0f s: killing it", process.pid, silent_s
                    )
                    process.kill()
                continue
            if message is None:
                return
            silent_s, self._heard_at = 0.0, time.monotonic()
            self._handle(message)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Events(events=events):
                for event in events:
                    self._flights.deliver(event)
            case StepBegan(request_ids=request_ids):
                self._in_step = frozenset(request_ids)
                self._flights.step_began(request_ids, time.monotonic())
            case Heartbeat(stats=stats):
                self._stats = stats

    async def _bury(self, process: WorkerProcess) -> None:
        self._process = None
        what = f"the engine worker {process.ending}"
        log.error("%s (pid %d, %d requests in flight)", what, process.pid, len(self._flights))
        totals = {name: getattr(self._past, name) + getattr(self._stats, name) for name in _TOTALS}
        self._past, self._stats = EngineStats(**totals), EngineStats()
        message = f"{what} while it computed this request; it is being restarted, send the request again"
        self._flights.survive_death(self._in_step, ErrorInfo("worker_died", message))
        self._note_death(what, lived_s=time.monotonic() - self._ready_at)
        await process.close()

    def _note_death(self, what: str, lived_s: float) -> None:
        self._backoff.record_death(time.monotonic(), lived_s)
        if self._backoff.is_open:
            self.refuse(
                f"{what}, as it did several times in a row; next try in {self._backoff.delay_s:.0f} s, "
                "the daemon's log says more"
            )

    def _send_unsent(self) -> None:
        if self._process is None:
            return
        for flight in self._flights.unsent():
            flight.sent = True
            self._process.send(Submit(request=flight.request))


_TOTALS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
