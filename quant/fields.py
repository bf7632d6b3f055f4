"""Typed access to a checkpoint's metadata: a missing or mistyped key is an error that names it. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from appliance.quant.errors import CheckpointError


def text(metadata: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = _value(metadata, key, "a string", default)
    if not isinstance(value, str):
        raise _mistyped(key, value, "a string")
    return value


def integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The value of `key`, or the default where there is one and the key is absent."""
    value = _value(metadata, key, "an integer", default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _mistyped(key, value, "an integer")
    return value


def positive(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = integer(metadata, key, default)
    if value < 1:
        raise CheckpointError(f"metadata {key!r} is {value}, expected at least 1")
    return value


def number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number."""
    value = _value(metadata, key, "a number", default)
    # An integer may be larger than any float.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise _mistyped(key, value, "a positive number")
    return float(value)


def flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false; null is the default."""
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _mistyped(key, value, "true or false")
    return value


def section(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object, empty where the key is absent or null."""
    value = metadata.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _mistyped(key, value, "an object")
    return value


def strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = _value(metadata, key, "an array of strings")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _mistyped(key, value, "an array of strings")
    return value


def numbers(metadata: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """An array of positive, finite numbers."""
    values = _value(metadata, key, "an array of positive numbers")
    if not isinstance(values, list):
        raise _mistyped(key, values, "an array of positive numbers")
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise CheckpointError(f"metadata {key!r} holds {value!r}, expected positive numbers")
    return tuple(float(value) for value in values)


def _value(metadata: Mapping[str, Any], key: str, expected: str, default: Any = None) -> Any:
    """The value of `key`; absent or null, it is the default, and without one an error."""
    value = metadata.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"metadata {key!r} is missing, expected {expected}")
    return value


def _mistyped(key: str, value: Any, expected: str) -> CheckpointError:
    found = f"an array of {len(value)}" if isinstance(value, list) else repr(value)[:80]
    return CheckpointError(f"metadata {key!r} is {found}, expected {expected}")
