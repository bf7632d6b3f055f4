"""What can be said of a setting: its values, its unit and whether it may be shown. Read from the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from appliance.engine.sampling_params import MAX_SEED
from appliance.settings_schema import Settings

_SIGNS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_LARGE = {MAX_SEED: "2^63 - 1"}
_KINDS = {bool: "true, false", int: "whole number", float: "number", tuple: "list", Path: "path"}


def facts(name: str) -> dict[str, Any]:
    """What `setting` was told of a field beyond what pydantic keeps."""
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def is_secret(name: str) -> bool:
    return bool(facts(name)["secret"])


def choices(name: str) -> tuple[Any, ...]:
    """The choices of a setting that has them, else ()."""
    annotation = Settings.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def values(name: str) -> str:
    """The values that a setting takes, as text: choices, a range with its unit, or a kind."""
    unit = f" {facts(name)['unit']}" if facts(name)["unit"] else ""
    if choices(name):
        return ", ".join(str(choice) for choice in choices(name)) + unit
    if _bounds(name):
        return _range(_bounds(name)) + unit
    annotation = Settings.model_fields[name].annotation
    kinds = {annotation, get_origin(annotation), *get_args(annotation)}
    return next((text for kind, text in _KINDS.items() if kind in kinds), "text")


def _bounds(name: str) -> dict[str, Any]:
    metadata = Settings.model_fields[name].metadata
    found = {key: getattr(item, key) for key in _SIGNS for item in metadata if hasattr(item, key)}
    return {key: _LARGE.get(bound, bound) for key, bound in found.items()}


def _range(bounds: dict[str, Any]) -> str:
    if bounds.keys() == {"ge", "le"}:
        low, high = bounds["ge"], bounds["le"]
        return f"{low}" if low == high else f"{low} to {high}"
    return " and ".join(f"{_SIGNS[key]} {bound}" for key, bound in bounds.items())
