"""The listening socket: bound before anything slow happens, so that a taken port is known at once.

It listens only once the daemon can accept. Until then clients are refused, instead of being left without an answer
for as long as a model is pulled.
"""

from __future__ import annotations

import errno
import socket

import psutil

from appliance.settings import Settings, SettingsError

BACKLOG = 256


class PortTakenError(SettingsError):
    """The address is in use; the message says by whom and how to choose another port."""


def bind(settings: Settings) -> socket.socket:
    """A bound socket, which does not listen yet.

    Raises:
        PortTakenError: somebody listens there already.
        SettingsError: the address cannot be bound.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SettingsError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refusal(error, host, port) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect to a socket from `bind`.

    Raises:
        PortTakenError: somebody else has come to listen there meanwhile.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _refusal(error, host, port) from None


def _refusal(error: OSError, host: str, port: int) -> SettingsError:
    if error.errno == errno.EADDRINUSE:
        return PortTakenError(
            f"port {port} on {host} is taken by {_holder(port)}; choose another one: --port {port + 1}"
        )
    return SettingsError(f"cannot listen on {host}:{port}: {error.strerror}")


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        connections = []
    for connection in connections:
        listens = (
            connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        )
        if listens and connection.pid is not None:
            try:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.Error:
                return f"process {connection.pid}"
    return "a process of another user"
