"""uvicorn as the daemon runs it: on a socket that is bound already, with signals left to the daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from appliance.daemon.app import build_app
from appliance.daemon.state import Daemon

# Longer than clients keep idle connections: none is to be closed just as a request comes.
KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """Serves the daemon's routes.

    Args:
        graceful_s: how long connections get to close at the end.
    """

    def __init__(self, daemon: Daemon, graceful_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(daemon),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                ssl_certfile=daemon.settings.ssl_certfile,
                ssl_keyfile=daemon.settings.ssl_keyfile,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(graceful_s),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handling would end the process by the signal, not with status 0."""
        yield

    def stop_accepting(self) -> None:
        """Close the listening socket; connections that are open stay so."""
        for server in getattr(self, "servers", ()):
            server.close()
