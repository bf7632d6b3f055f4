"""What must hold before the daemon may listen: no open door to others, and certificates that can be used."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import ssl
from pathlib import Path

from appliance.api_keys import KeyFile
from appliance.settings import LOOPBACK_HOSTS, Settings, SettingsError

log = logging.getLogger(__name__)


def check(settings: Settings) -> None:
    """Refuse to start where that would be unsafe, or must fail.

    Raises:
        SettingsError: a public address or a page of anybody's while no key is needed, or unusable certificates.
        KeyFileError: the file of keys cannot be used.
    """
    needs_key = _needs_key(settings)
    if not needs_key and not is_loopback(settings.host):
        raise SettingsError(
            f"host is {settings.host}, which other machines can reach, but no api_key is set; set "
            "APPLIANCE_API_KEY (or api_key in config.toml, or make one with `appliance key new`), or leave host "
            "at 127.0.0.1"
        )
    if not needs_key and "*" in settings.allowed_origins:
        raise SettingsError(
            "allowed_origins is *, which lets every web page that you visit use this daemon, but no api_key is "
            "set; set one, or list the pages, e.g. http://localhost:3000"
        )
    if settings.ssl_certfile and settings.ssl_keyfile:
        _load_certificates(settings)


def is_loopback(host: str) -> bool:
    if host in LOOPBACK_HOSTS:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _needs_key(settings: Settings) -> bool:
    if settings.api_keys_file and not settings.api_keys_file.exists():
        raise SettingsError(
            f"api_keys_file {settings.api_keys_file} does not exist; `appliance key new` makes it, with a key"
        )
    file = KeyFile(settings.keys_file)
    file.entries()
    return bool(settings.api_key) or file.path.exists()


def _load_certificates(settings: Settings) -> None:
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, name)
        try:
            path.read_bytes()
        except OSError as error:
            raise SettingsError(f"cannot read {name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A passphrase would be asked for on the terminal, which a service has none of.
        context.load_cert_chain(
            str(settings.ssl_certfile), str(settings.ssl_keyfile), password=_no_passphrase
        )
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(
            f"ssl_certfile {settings.ssl_certfile} and ssl_keyfile {settings.ssl_keyfile} cannot be used: "
            f"{_reason(error)}; expected a certificate chain and its private key in PEM, without a passphrase"
        ) from None
    complaint = _complaint(context, settings.ssl_certfile)
    if complaint:
        log.warning(
            "ssl_certfile %s: %s; clients will refuse it, set one that is valid now",
            settings.ssl_certfile,
            complaint,
        )


def _complaint(server: ssl.SSLContext, certfile: Path | None) -> str:
    """What a client that knows this very certificate has against it, such as its dates; "" if nothing."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certfile)
    upstream, downstream = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(downstream, upstream)
    answering = server.wrap_bio(upstream, downstream, server_side=True)
    # Hello; hello with the certificate; judgement.
    for side in (asking, answering, asking):
        try:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            return str(error.verify_message)
    return ""


def _no_passphrase() -> str:
    raise ValueError("the private key has a passphrase")


def _reason(error: Exception) -> str:
    name = getattr(error, "reason", None)
    return str(name).replace("_", " ").lower() if name else str(error)
