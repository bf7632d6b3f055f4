"""Settings, resolved once (defaults < file < environment < flags), then frozen.

Every name is the same everywhere: `max_num_seqs` in config.toml, `APPLIANCE_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. This module is the only reader of `os.environ`.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.settings_facts import facts, is_secret
from appliance.settings_schema import LOOPBACK_HOSTS, Settings, SettingsError
from appliance.settings_vllm import FOREIGN, RENAMED, refusal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "COMMAND_LINE",
    "LOOPBACK_HOSTS",
    "PYTHON",
    "Resolved",
    "Settings",
    "SettingsError",
    "Source",
    "environment_with",
    "load_settings",
    "resolve",
]

ENV_PREFIX = "APPLIANCE_"
CONFIG_FILE = "config.toml"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, and for each that is not at its default, where it was set.

    Attributes:
        origins: a path, a variable's name or a flag, by the setting's name.
        notes: sentences about settings that were taken under another name, or dropped.
    """

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where settings come from; `spell` says how a setting's name is shown as written there."""

    where: str
    spell: Callable[[str], str]


COMMAND_LINE = Source("the command line", lambda name: f"--{name.replace('_', '-')}")
PYTHON = Source("the call", str)
_ENVIRONMENT = Source("the environment", lambda name: ENV_PREFIX + name.upper())


def load_settings(flags: Mapping[str, Any] | None = None, source: Source = COMMAND_LINE) -> Settings:
    """As `resolve`; the notes are logged as warnings."""
    resolved = resolve(flags, source)
    for note in resolved.notes:
        log.warning("%s", note)
    return resolved.settings


def resolve(flags: Mapping[str, Any] | None = None, source: Source = COMMAND_LINE) -> Resolved:
    """Resolve the settings. Flags whose value is None count as not given.

    Args:
        source: where the flags come from.

    Raises:
        SettingsError: an unknown name (with the nearest known one), a value out of range (with its source), or
            something that is not supported (with what to do instead).
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    environment = _from_environment(os.environ)
    config_dir = given.get("config_dir") or environment.get("config_dir") or Settings().config_dir
    # A home folder that is not known is refused with the other settings.
    path = Path(os.path.expanduser(config_dir)) / CONFIG_FILE
    file = Source(str(path), repr)
    values: dict[str, Any] = {}
    places: dict[str, Source] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for layer, found in ((file, _from_file(path)), (_ENVIRONMENT, environment), (source, given)):
        for name, written in _names(layer, found, notes).items():
            values[name], places[name] = found[written], layer
            origins[name] = layer.where if layer is file else layer.spell(written)
        if layer is file and "config_dir" in values:
            raise SettingsError(f"config_dir in {path} has no effect there: it says where that file is")
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError(_explained(error, places)) from None
    return Resolved(settings, origins, tuple(notes))


def environment_with(**settings: str) -> dict[str, str]:
    """Our own environment with these settings, for a child that is to have them."""
    return {**os.environ, **{ENV_PREFIX + name.upper(): value for name, value in settings.items()}}


def _names(layer: Source, values: Mapping[str, Any], notes: list[str]) -> dict[str, str]:
    """The settings that are among `values`, each with its name as written; what was renamed or dropped is noted."""
    found: dict[str, str] = {}
    for written, value in values.items():
        plain = written.replace("-", "_")
        name = RENAMED.get(plain, plain)
        shown = layer.spell(written)
        if name in FOREIGN:
            refused = refusal(name, value)
            if refused:
                raise SettingsError(f"{shown} in {layer.where} is not supported: {refused}")
            notes.append(f"{shown} in {layer.where} has no effect: {FOREIGN[name].advice}")
        elif name not in Settings.model_fields:
            raise SettingsError(f"unknown setting {shown} in {layer.where}{_nearest(name, layer)}")
        elif name in found:
            both = f"{layer.spell(found[name])} and {shown}"
            raise SettingsError(f"{both} in {layer.where} are the same setting; keep {layer.spell(name)}")
        else:
            if name != written:
                notes.append(
                    f"{shown} in {layer.where} is called {layer.spell(name)} here, and taken as that"
                )
            found[name] = written
    return found


def _explained(error: ValidationError, places: Mapping[str, Source]) -> str:
    first = error.errors()[0]
    problem = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return problem
    name = str(first["loc"][0])
    where = places[name].where
    if is_secret(name):
        return f"{name} in {where}: {problem}"
    why = f"; {facts(name)['why']}" if facts(name)["why"] else ""
    return f"{name} in {where}: {problem} (found {first['input']!r}){why}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for key, value in environ.items():
        if key.startswith(ENV_PREFIX):
            values[key[len(ENV_PREFIX) :].lower()] = value
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        # Editors of other systems begin a file with a mark that TOML doesn't know.
        found = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None
    for name, value in found.items():
        if isinstance(value, dict) and name not in FOREIGN:
            raise SettingsError(
                f"{path} has a section [{name}]; settings stand in no section, leave that line out"
            )
    return found


def _nearest(name: str, layer: Source) -> str:
    near = difflib.get_close_matches(name, [*Settings.model_fields, *RENAMED], n=1)
    return f"; did you mean {layer.spell(RENAMED.get(near[0], near[0]))}?" if near else ""
