"""A daemon of one's own, for as long as a terminal chat lasts."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial

from appliance.cli.chat import ChatClient, ChatError
from appliance.engine.lifeline import die_with_parent
from appliance.progress import LoadProgress
from appliance.settings import Settings, environment_with

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0


@contextlib.contextmanager
def own_daemon(settings: Settings) -> Iterator[ChatClient]:
    """`appliance serve` for `settings.model` on a free port: ready when this yields, ended afterwards.

    Raises:
        ChatError: it could not be started, with what it said.
    """
    port = _free_port()
    # `-m` would import from the working directory, which is kept for the sake of relative paths.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe_path, "-m", "appliance.cli.main", "serve", settings.model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "0"]
    command += ["--download-dir", str(settings.download_dir), "--config-dir", str(settings.config_dir)]
    # Whatever keys and certificates are configured: this daemon answers to us, over plain loopback.
    key = secrets.token_urlsafe(32)
    environment = environment_with(api_key=key, ssl_certfile="", ssl_keyfile="")
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # Ctrl-C ends an answer, not the daemon.
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )
        try:
            with ChatClient(f"http://127.0.0.1:{port}", key) as client:
                with LoadProgress(settings.model, plain=True) as progress:
                    while (share := client.loading()) is not None:
                        if child.poll() is not None:
                            said.seek(0)
                            raise ChatError(
                                _last_line(said.read().decode(errors="replace"), child.returncode)
                            )
                        if share:
                            progress.at(share)
                        time.sleep(POLL_S)
                yield client
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(said: str, code: int) -> str:
    lines = said.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else f"the daemon ended with status {code}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
