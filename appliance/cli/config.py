"""`appliance config`: what is set, and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli.console import note, say
from appliance.cli.options import given, with_settings
from appliance.settings import Resolved, resolve
from appliance.settings_docs import sample, toml
from appliance.settings_facts import is_secret
from appliance.settings_schema import Settings

MASK = "***"
DEFAULT = "default"


@with_settings
def config(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_sample: Annotated[
        bool, typer.Option("--sample", help="Print a config.toml with every setting.")
    ] = False,
    **flags: Any,
) -> None:
    """Print each setting and where it was set; keys are not shown. Takes the same options as `serve`."""
    if as_sample:
        say(sample().rstrip())
        return
    resolved = resolve(given(flags))
    for text in resolved.notes:
        note(text)
    if as_json:
        say(json.dumps(_rows(resolved), indent=2))
        return
    lines = [(f"{name} = {_written(row['value'])}", row["source"]) for name, row in _rows(resolved).items()]
    width = max(len(line) for line, _ in lines)
    for line, source in lines:
        say(f"{line.ljust(width)}  # {source}")


def _rows(resolved: Resolved) -> dict[str, dict[str, Any]]:
    rows = {}
    for name in Settings.model_fields:
        value = getattr(resolved.settings, name)
        if is_secret(name):
            value = tuple(MASK for _ in value)
        shown = str(value) if isinstance(value, Path) else value
        rows[name] = {"value": shown, "source": resolved.origins.get(name, DEFAULT)}
    return rows


def _written(value: Any) -> str:
    return "none" if value is None else toml(value)
