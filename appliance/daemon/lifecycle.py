"""From start to a clean end: HTTP and the model side by side; one signal drains, a second one ends at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from appliance.daemon.errors import EngineFailure
from appliance.daemon.listener import listen
from appliance.daemon.state import Daemon, ServedModel
from appliance.daemon.worker import WorkerHandle, WorkerUnavailableError
from appliance.engine.types import ErrorInfo
from appliance.settings import Settings
from appliance.store import ModelPath
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from appliance.daemon.http_server import HttpServer

DRAIN_POLL_S = 0.05
# For clients to be sent the error that ends their request, and for connections to close.
FAREWELL_S = 2.0

log = logging.getLogger(__name__)


class Signals:
    """SIGINT and SIGTERM: the first asks for a drain, any further one for an end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.abort = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received)

    def _received(self) -> None:
        (self.abort if self.drain.is_set() else self.drain).set()


async def serve(
    settings: Settings,
    model_name: str,
    model: ModelPath,
    listener: socket.socket,
    progress: Callable[[float], None],
    announce: Callable[[ServedModel], None],
) -> None:
    """Serve a model on `listener` until a signal comes; all requests and the worker have ended at the return.

    Args:
        progress: told the share of the weights that are read.
        announce: called once the model is loaded.

    Raises:
        WorkerUnavailableError, TextError: the model could not be loaded.
        PortTakenError: somebody else has come to listen there since `listener` was bound.
    """
    signals = Signals()
    listen(listener)
    daemon = Daemon(settings, model_name)
    worker = WorkerHandle(settings.engine_config(model.path))
    daemon.router.add(model_name, worker)
    loading = asyncio.create_task(_load(daemon, worker, model, progress))
    # Importing the web framework takes half a second; the worker starts meanwhile.
    http_server = await asyncio.to_thread(import_module, "appliance.daemon.http_server")
    server: HttpServer = http_server.HttpServer(daemon, graceful_s=FAREWELL_S)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    drain = asyncio.create_task(signals.drain.wait())
    try:
        await asyncio.wait({http, loading, drain}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            announce(loading.result())
            await asyncio.wait({http, drain}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(daemon, server, signals)
    finally:
        loading.cancel()
        drain.cancel()
        await asyncio.wait({loading})
        server.should_exit = True
        await http
        await daemon.router.stop()


async def _load(
    daemon: Daemon, worker: WorkerHandle, model: ModelPath, progress: Callable[[float], None]
) -> ServedModel:
    """Load engine and tokeniser side by side; requests that wait for them go on, or hear why not."""
    starting = asyncio.create_task(worker.start(progress))
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, model.path)
        info = await starting
    except Exception as error:
        _settle(daemon, WorkerUnavailableError(str(error)))
        raise
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
    served = ServedModel(daemon.model_name, info, tokenizer, ChatTemplate.of(tokenizer), model.sampling)
    for note in info.notes:
        log.warning("%s", note)
    if not daemon.loaded.done():  # it may have been given up meanwhile
        daemon.loaded.set_result(served)
    return served


def _settle(daemon: Daemon, error: Exception) -> None:
    """Let those who wait for the model hear that it will not come, unless it has."""
    if not daemon.loaded.done():
        daemon.loaded.set_exception(error)
        daemon.loaded.exception()


async def _drain(daemon: Daemon, server: HttpServer, signals: Signals) -> None:
    """Accept nothing more, let running requests finish for `drain_timeout`, then end them with an error."""
    daemon.draining.set()
    server.stop_accepting()
    error = ErrorInfo("shutting_down", "the daemon is shutting down; the request was ended")
    _settle(daemon, EngineFailure(error))
    log.info("shutting down: %d requests to finish", daemon.active)
    await _until_idle(daemon, daemon.settings.drain_timeout, signals.abort)
    if daemon.active:
        log.warning("ending %d requests that are still running", daemon.active)
        daemon.router.fail_all(error)
        await _until_idle(daemon, FAREWELL_S, asyncio.Event())


async def _until_idle(daemon: Daemon, timeout_s: float, stop: asyncio.Event) -> None:
    deadline = time.monotonic() + timeout_s
    while daemon.active and not stop.is_set() and time.monotonic() < deadline:
        await asyncio.sleep(DRAIN_POLL_S)
