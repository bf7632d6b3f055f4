"""The engine worker: one process per loaded model, driven by the daemon over ZeroMQ.

Started as `python -m appliance.engine ADDRESS PARENT_PID`; speaks `engine.protocol`. Ends when told to, or with the
daemon. Unloading a model is ending its worker: every byte comes back, always.
"""

from __future__ import annotations

import gc
import logging
import math
import time

import zmq

from appliance.engine import protocol
from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.errors import EngineError
from appliance.engine.types import ErrorInfo, TokenEvent
from appliance.engine.weights import Progress
from appliance.quant.errors import CheckpointError

_START_TIMEOUT_MS = 60_000
_MESSAGES_PER_STEP = 64
log = logging.getLogger("appliance.worker")


class Worker:
    """Owns an engine and the socket through which the daemon drives it."""

    def __init__(self, socket: zmq.Socket[bytes], engine: Engine) -> None:
        self._socket = socket
        self._engine = engine
        self._begun: tuple[str, ...] = ()
        self._last_heartbeat = 0.0
        self._was_busy = False

    def serve(self) -> None:
        """Take messages and run steps until told to stop."""
        while self._take_messages():
            if self._engine.has_work:
                self._step()
            self._heartbeat()

    def _take_messages(self) -> bool:
        """Handle every message that has arrived, waiting for one only while there is no work; False: stop."""
        timeout_ms = 0 if self._engine.has_work else int(protocol.HEARTBEAT_S * 1000)
        # So many at most, lest a flood of requests keep those that run from their next step.
        for _ in range(_MESSAGES_PER_STEP):
            if not self._socket.poll(timeout_ms):
                break
            match protocol.decode_to_worker(self._socket.recv()):
                case protocol.Submit(request):
                    try:
                        self._engine.add(request)
                    except EngineError as error:
                        info = ErrorInfo(error.code, str(error))
                        self._send_events(
                            [
                                TokenEvent(
                                    request_id=request.id, finish_reason="error", is_last=True, error=info
                                )
                            ]
                        )
                case protocol.Abort(request_id, index):
                    self._send_events(self._engine.abort(request_id, index))
                case protocol.Stop():
                    return False
                case protocol.Start():
                    log.error("a second Start message was ignored: this worker has a model already")
            timeout_ms = 0
        return True

    def _step(self) -> None:
        plan = self._engine.plan()
        begun = tuple(sorted({row.request_id for row in plan.rows}))
        if begun != self._begun:
            self._begun = begun
            self._send(protocol.StepBegan(begun))
        self._send_events(self._engine.run(plan))

    def _heartbeat(self) -> None:
        # Also at once when the last request has ended, so that freed blocks are seen within moments.
        now, busy = time.monotonic(), self._engine.has_work
        if now - self._last_heartbeat >= protocol.HEARTBEAT_S or (self._was_busy and not busy):
            self._send(protocol.Heartbeat(self._engine.stats()))
            self._last_heartbeat = now
        self._was_busy = busy

    def _send_events(self, events: list[TokenEvent]) -> None:
        if events:
            self._send(protocol.Events(tuple(events)))

    def _send(self, message: protocol.FromWorker) -> None:
        self._socket.send(protocol.encode(message))


def main(address: str) -> int:
    """Load the model that the daemon names, serve it until told to stop, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.set(zmq.SNDHWM, 0)
    socket.connect(address)
    if not socket.poll(_START_TIMEOUT_MS):
        log.error("the daemon sent nothing within %d s", _START_TIMEOUT_MS // 1000)
        context.destroy(linger=0)
        return 1
    start = protocol.decode_to_worker(socket.recv())
    assert isinstance(start, protocol.Start), f"the first message was {type(start).__name__}, expected Start"
    try:
        engine = _load(start.config, _LoadReport(socket))
    except _LoadError as error:
        socket.send(protocol.encode(protocol.LoadFailed(error.info)))
        context.destroy(linger=1000)
        return 1
    # What there is by now stays: looking through it for garbage again and again costs steps a few per cent.
    gc.collect()
    gc.freeze()
    socket.send(protocol.encode(protocol.Ready(engine.info)))
    Worker(socket, engine).serve()
    context.destroy(linger=1000)
    return 0


class _LoadReport:
    """Tells the daemon how far loading has come."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._told_at = -math.inf

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._told_at >= protocol.HEARTBEAT_S:
            self._socket.send(protocol.encode(protocol.Loading(done, total)))
            self._told_at = now


class _LoadError(Exception):
    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def _load(config: EngineConfig, progress: Progress) -> Engine:
    try:
        return Engine(config, progress)
    except CheckpointError as error:
        raise _LoadError(ErrorInfo("bad_checkpoint", str(error))) from error
    except EngineError as error:
        raise _LoadError(ErrorInfo(error.code, str(error))) from error
    except Exception as error:
        log.exception("the model could not be loaded")
        raise _LoadError(ErrorInfo("load_failed", f"{type(error).__name__}: {error}")) from error
