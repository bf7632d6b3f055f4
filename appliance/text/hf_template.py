"""The chat template of a model folder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.json_file import read_json

MAX_TEMPLATE_BYTES = 4 << 20


def read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, else chat_template.json, else tokenizer_config.json (`config`); None without any.

    Of several named templates it is the one called `default`.

    Raises:
        CheckpointError: a template that is no text.
    """
    plain, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if plain.is_file():
        return _text(plain)
    if wrapped.is_file():
        return _chosen(wrapped, read_json(wrapped).get("chat_template"))
    return _chosen(folder / "tokenizer_config.json", config.get("chat_template"))


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, expected at most {MAX_TEMPLATE_BYTES}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 ({error}); fetch the file again") from None


def _chosen(path: Path, value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = next((item.get("template") for item in value if item.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            f"{path}: chat_template is a {type(value).__name__}, expected a text or a list of named texts"
        )
    return value
