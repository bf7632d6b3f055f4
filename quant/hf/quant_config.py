"""What a model folder says of its quantisation, under one name for each thing whichever tool wrote it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.quant import fields
from appliance.quant.errors import located
from appliance.quant.hf.json_file import read_json

# Beside config.json, tools write what they did to one of these.
_OTHER_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
_BITS = ("bits", "w_bit", "wbits")
_GROUP_SIZE = ("group_size", "q_group_size")


@dataclass(frozen=True, slots=True, eq=False)
class QuantConfig:
    """The claims of a configuration; None or "" where it is silent. Tensors decide, claims are compared.

    Hashed by identity, so that what is made of a configuration can be kept by it.

    Attributes:
        source: the file's name.
        method: lower-case, e.g. "gptq"; "" for a model that is not quantised.
        group_size: -1 where a whole row is one group.
        format: the method's variant, lower-case, e.g. "gemm", "gptq_v2", "auto_round:auto_gptq".
        raw: everything.
        disputed: another file that says another format; "" where none does.
    """

    source: str = ""
    method: str = ""
    bits: int | None = None
    group_size: int | None = None
    format: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)
    disputed: str = ""

    def overridden(self, rule: Mapping[str, Any]) -> QuantConfig:
        """With the bits and the group size that a rule for some layers sets.

        Raises:
            CheckpointError: they are no integers.
        """
        bits, group_size = _first_integer(rule, *_BITS), _first_integer(rule, *_GROUP_SIZE)
        return replace(
            self,
            bits=self.bits if bits is None else bits,
            group_size=self.group_size if group_size is None else group_size,
        )


def read_quant_config(folder: Path, config: Mapping[str, Any]) -> tuple[QuantConfig, tuple[str, ...]]:
    """The claims of config.json, of the tool's own file in what that is silent on, and where the two disagree.

    Raises:
        CheckpointError: a claim is mistyped, or a file is not JSON.
    """
    raws = {"config.json": fields.section(config, "quantization_config")}
    for name in _OTHER_FILES:
        if (folder / name).is_file():
            raws[name] = read_json(folder / name)
    found = [_parse(folder, name, raw) for name, raw in raws.items() if raw]
    if not found:
        return QuantConfig(), ()
    first, *others = found
    notes = tuple(note for other in others for note in _disagreements(first, other))
    for other in others:
        if other.method == first.method:
            first = _completed(first, other)
    return first, notes


def _completed(first: QuantConfig, other: QuantConfig) -> QuantConfig:
    """What the first says, then what the other adds to it."""
    return replace(
        first,
        bits=other.bits if first.bits is None else first.bits,
        group_size=other.group_size if first.group_size is None else first.group_size,
        format=first.format or other.format,
        disputed=first.disputed
        or (other.source if other.format not in ("", first.format or other.format) else ""),
        raw={**other.raw, **first.raw},
    )


def _parse(folder: Path, name: str, raw: Mapping[str, Any]) -> QuantConfig:
    with located(folder / name):
        method = _first_text(raw, "quant_method", "method")
        formats = ("packing_format", "checkpoint_format", "format", "version")
        return QuantConfig(
            source=name,
            # Files that only say bits and groups were written before others than GPTQ had a file of their own.
            method=method or ("gptq" if "bits" in raw else "awq" if "w_bit" in raw else ""),
            bits=_first_integer(raw, *_BITS),
            group_size=_first_integer(raw, *_GROUP_SIZE),
            format=_first_text(raw, *formats),
            raw=raw,
        )


def _first_text(raw: Mapping[str, Any], *keys: str) -> str:
    return next((fields.text(raw, key).lower() for key in keys if raw.get(key) is not None), "")


def _first_integer(raw: Mapping[str, Any], *keys: str) -> int | None:
    return next((fields.integer(raw, key) for key in keys if raw.get(key) is not None), None)


def _disagreements(one: QuantConfig, other: QuantConfig) -> list[str]:
    pairs = (
        ("the method", one.method, other.method),
        ("the bits", one.bits, other.bits),
        ("the group size", one.group_size, other.group_size),
        ("the format", one.format, other.format),
    )
    return [
        f"{one.source} says that {what} is {mine}, {other.source} that it is {theirs}: the tensors decide"
        for what, mine, theirs in pairs
        if mine not in (None, "") and theirs not in (None, "") and mine != theirs
    ]
