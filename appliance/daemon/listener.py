"""The listening socket: bound before anything slow happens, so that a taken port is known at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

import psutil

from appliance.settings import LOOPBACK_HOSTS, Settings, SettingsError


class PortTakenError(SettingsError):
    """The address is in use; the message says by whom and how to choose another port."""


def bind(settings: Settings) -> socket.socket:
    """A bound socket; `listen` is called once the daemon can accept.

    Raises:
        PortTakenError: somebody listens there already.
        SettingsError: the address cannot be bound, or is public while no API key is set.
    """
    host, port = settings.host, settings.port
    if not settings.api_key and not _is_loopback(host):
        raise SettingsError(
            f"host is {host}, which other machines can reach, but no api_key is set; set APPLIANCE_API_KEY "
            "(or api_key in config.toml), or leave host at 127.0.0.1"
        )
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SettingsError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(256)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken by {_holder(port)}; choose another one: --port {port + 1}"
            ) from None
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    if host in LOOPBACK_HOSTS:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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
