"""One life of an engine worker: the child process and the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from appliance.engine.config import EngineConfig
from appliance.engine.protocol import FromWorker, Start, Stop, ToWorker, decode_from_worker, encode

# A Unix socket's address has room for 107 bytes; libzmq's own limit is the same.
MAX_SOCKET_PATH_BYTES = 107
STOP_TIMEOUT_S = 5.0
# After the process has ended, what it had sent is still on its way through libzmq's thread.
LAST_WORDS_S = 0.1


class WorkerProcess:
    """A started child. `receive` until it returns None, then `close`."""

    def __init__(self, child: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, home: Path) -> None:
        self._child = child
        self._socket = socket
        self._home = home
        self._ended = asyncio.ensure_future(child.wait())
        self._incoming: asyncio.Future[bytes] | None = None
        self._outbox: asyncio.Queue[ToWorker] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_outbox())

    @classmethod
    async def launch(cls, context: zmq.asyncio.Context, config: EngineConfig) -> WorkerProcess:
        """Start a child and send it `config`. It runs in `/`, so as not to import what lies around here."""
        home = _private_dir()
        address = f"ipc://{home / 'worker'}"
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(address)
            safe_path = ["-P"] if sys.version_info >= (3, 11) else []
            command = [sys.executable, *safe_path, "-m", "appliance.engine", address, str(os.getpid())]
            child = await asyncio.create_subprocess_exec(
                *command,
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__,
                stderr=sys.__stderr__,
                # Ctrl-C goes to the terminal's foreground group: it is to drain us, not to kill the worker.
                start_new_session=True,
            )
        except BaseException:
            socket.close()
            shutil.rmtree(home, ignore_errors=True)
            raise
        process = cls(child, socket, home)
        process.send(Start(config=config))
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def ending(self) -> str:
        """How the process ended, to follow "the worker"."""
        code = self._child.returncode
        if code is None:
            return "is still running"
        if code >= 0:
            return f"exited with status {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def send(self, message: ToWorker) -> None:
        """Queue a message, never waiting; it is lost if the process ends before it has read it."""
        self._outbox.put_nowait(message)

    async def _send_outbox(self) -> None:
        # A socket of this kind takes no message before its peer has connected: that is why sending is a task.
        while True:
            await self._socket.send(encode(await self._outbox.get()))

    async def receive(self, timeout_s: float) -> FromWorker | None:
        """The next message, or None when the process has ended and all that it sent was read.

        Raises:
            asyncio.TimeoutError: neither happened within `timeout_s`.
        """
        if self._incoming is None:
            self._incoming = asyncio.ensure_future(self._socket.recv())
        incoming = self._incoming
        either: set[asyncio.Future[Any]] = {incoming, self._ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not incoming.done() and self._ended.done():
            await asyncio.wait({incoming}, timeout=LAST_WORDS_S)
        if incoming.done():
            self._incoming = None
            return decode_from_worker(incoming.result())
        if self._ended.done():
            return None
        raise asyncio.TimeoutError

    def kill(self) -> None:
        """SIGKILL the child and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the child to end, insist after `STOP_TIMEOUT_S`; it has ended when this returns."""
        self.send(Stop())
        await asyncio.wait({self._ended}, timeout=STOP_TIMEOUT_S)
        self.kill()
        await self._ended
        await self.close()

    async def close(self) -> None:
        """Give back the socket and its directory. The process must have ended."""
        await self._ended
        self._sender.cancel()
        if self._incoming is not None:
            self._incoming.cancel()
        self._socket.close()
        shutil.rmtree(self._home, ignore_errors=True)


def _private_dir() -> Path:
    """A new directory that only this user can enter (mode 0700), short enough for a socket's path."""
    home = Path(tempfile.mkdtemp(prefix="appliance-"))
    if len(os.fsencode(home / "worker")) > MAX_SOCKET_PATH_BYTES:
        home.rmdir()
        home = Path(tempfile.mkdtemp(prefix="appliance-", dir="/tmp"))
    return home
