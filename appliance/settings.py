"""Settings: one schema, resolved once (defaults < file < environment < flags), then frozen.

Every name is the same everywhere: `max_num_seqs` in config.toml, `APPLIANCE_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. This module is the only reader of `os.environ`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.engine.config import EngineConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "APPLIANCE_"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class SettingsError(Exception):
    """A setting is unknown or out of range; the message names the setting and where it was set."""


class Settings(BaseModel):
    """Every setting of the daemon, with its default and range.

    Attributes:
        download_dir: where models are kept.
        config_dir: where `config.toml` and the user's own `models.toml` are looked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2:135m"
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_model_len: int | None = Field(default=None, ge=16)
    max_num_seqs: int = Field(default=64, ge=1, le=1024)
    max_num_batched_tokens: int = Field(default=128, ge=16, le=65536)
    block_size: int = Field(default=16, ge=8, le=64)
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    num_threads: int | None = Field(default=None, ge=1)
    request_timeout: float = Field(default=600.0, gt=0)
    drain_timeout: float = Field(default=30.0, ge=0)
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    download_dir: Path = Path(platformdirs.user_data_dir("appliance")) / "models"
    config_dir: Path = Path(platformdirs.user_config_dir("appliance"))

    def engine_config(self, model_path: Path) -> EngineConfig:
        """The settings that an engine for this model file is started with."""
        names = set(EngineConfig.__struct_fields__) - {"model_path"}
        return EngineConfig(model_path=str(model_path), **self.model_dump(include=names))


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Resolve the settings. Flags whose value is None count as not given.

    Raises:
        SettingsError: an unknown name (with the nearest known one) or a value out of range (with its source).
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    environment = _from_environment(os.environ)
    config_dir = Path(given.get("config_dir") or environment.get("config_dir") or Settings().config_dir)
    path = config_dir / "config.toml"
    layers = [(str(path), _from_file(path)), ("the environment", environment), ("the command line", given)]
    merged: dict[str, Any] = {"config_dir": config_dir}
    source: dict[str, str] = {}
    for where, values in layers:
        for name, value in values.items():
            if name not in Settings.model_fields:
                raise SettingsError(f"unknown setting {name!r} in {where}{_nearest(name)}")
            merged[name], source[name] = value, where
    try:
        return Settings(**merged)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        where = source.get(name, "the defaults")
        raise SettingsError(f"{name} in {where}: {first['msg']} (found {first['input']!r})") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    values = {}
    for key, value in environ.items():
        if key.startswith(ENV_PREFIX):
            values[key[len(ENV_PREFIX) :].lower()] = value
    return values


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
