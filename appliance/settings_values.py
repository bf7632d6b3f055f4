"""What single values of settings may look like, and what they are turned into."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

_HOST = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_ORIGIN = re.compile(r"https?://[^/?#\s@*]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def listed(value: Any) -> Any:
    """A list written as text: a JSON list, or its items between commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f'expected a list such as ["a", "b"], but {error}') from None
    return [item.strip() for item in value.split(",") if item.strip()]


def whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def parse_host(text: str) -> str:
    """A name or address, as a Host header has it but for the brackets of an IPv6 address."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        name = text.lower()
    if not _HOST.fullmatch(name):
        raise ValueError(
            f"{text!r} is no host; expected a name or address without scheme and port, such as box.lan, "
            "192.168.1.5 or ::1"
        )
    return name


def parse_origin(text: str) -> str:
    """An origin as browsers send it: in lower case, and without the port that its scheme implies."""
    origin = text.lower().rstrip("/")
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f"{text!r} is no origin; expected one such as https://chat.lan or http://localhost:3000"
        )
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))


def parse_device(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise ValueError("expected auto, cpu, cuda, or the number of a GPU as in cuda:0")
    return text


Device = Annotated[str, AfterValidator(parse_device)]
Texts = Annotated[tuple[str, ...], BeforeValidator(listed)]
BlockSize = Annotated[Literal[16, 32, 64], BeforeValidator(whole)]
