"""What a compressed-tensors configuration says: what is refused from it alone, and what it claims of a layer. No torch.

Follows compressed-tensors 0.13 and 0.19 (quantization/quant_config.py, quant_args.py, quant_scheme.py, utils/match.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.hf.module import Advice
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.patterns import limit_patterns, matches_start
from appliance.quant.scheme import BITS

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
# Of the whole model: its groups, if any, say the rest.
_MODEL_FORMATS = (*FORMATS, "mixed-precision", "dense")
_STATUSES = ("compressed", "frozen")
_STRATEGIES = ("tensor", "channel", "group", "block")
_BLOCK = [128, 128]
_REGEX = "re:"


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """How a group of layers is quantised.

    Attributes:
        strategy: what shares a scale: the "tensor", a "channel" (row), a "group" in a row, or a "block" of rows and
            columns.
        group_size: -1 where a whole row is one group.
        block: its rows and columns.
        act_order: whether groups are of columns that do not follow each other, so that there is a `weight_g_idx`.
    """

    bits: int
    is_float: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    symmetric: bool
    act_order: bool


@dataclass(frozen=True, slots=True)
class _Group:
    targets: tuple[str, ...]
    format: str
    weights: WeightArgs | None
    activations: bool


@dataclass(frozen=True, slots=True)
class _Rules:
    """Which layers are in which group; patterns with their prefix."""

    by_target: Mapping[str, _Group]
    target_patterns: tuple[str, ...]
    ignored_names: frozenset[str]
    ignored_patterns: tuple[str, ...]


def check(config: QuantConfig) -> None:
    """Refuses what is not read.

    Raises:
        CheckpointError: an entry is mistyped.
        UnsupportedFormatError: the message names the entry, what it says and what works.
    """
    raw = config.raw
    with located(config.source):
        _known("quantization_status", fields.text(raw, "quantization_status", "compressed"), _STATUSES)
        _known("format", fields.text(raw, "format", "dense"), _MODEL_FORMATS)
        sparsity = fields.text(fields.section(raw, "sparsity_config"), "format", "dense")
        _known("sparsity_config.format", sparsity, ("dense",))
        if fields.section(fields.section(raw, "transform_config"), "config_groups"):
            raise UnsupportedFormatError(
                "transform_config rotates activations while the model runs, which is not done; take a quantisation "
                "without transforms"
            )
        for group in _groups(raw):
            _known("format of a group", group.format, (*FORMATS, "dense"))
        rules = _rules(config)
        limit_patterns((*rules.ignored_patterns, *rules.target_patterns))


def notes(config: QuantConfig) -> tuple[str, ...]:
    """What the configuration asks for and does not get; sentences for the log."""
    raw, found = config.raw, []
    if any(group.activations for group in _rules(config).by_target.values()):
        found.append(f"{config.source} asks for quantised activations: only the weights are quantised here")
    if raw.get("kv_cache_scheme") is not None:
        found.append(f"{config.source} asks for a quantised key-value cache: kv_cache_scheme is ignored")
    try:
        _match("", config)
    except UnsupportedFormatError as error:
        found.append(
            f"{config.source}: {error}, so what it says of single layers is ignored: the tensors decide"
        )
    return tuple(found)


def advise(config: QuantConfig, module: str) -> Advice:
    try:
        group = _match(module, config)
    except UnsupportedFormatError:
        return Advice()
    if group is None or group.weights is None:
        return Advice(quantized=False)
    return Advice(True, group.weights.bits, group.weights.group_size)


def weight_args(config: QuantConfig, module: str) -> WeightArgs | None:
    """How the configuration says that a layer is quantised; None where it does not."""
    if config.method != METHOD:
        return None
    try:
        group = _match(module, config)
    except UnsupportedFormatError:
        return None
    return None if group is None else group.weights


def _match(module: str, config: QuantConfig) -> _Group | None:
    """The group that a layer is in: by its name before a pattern before its class; None where it is ignored.

    Raises:
        UnsupportedFormatError: a pattern is not understood.
    """
    rules = _rules(config)
    class_ = "Embedding" if module.endswith("embed_tokens") else "Linear"
    # Every pattern is tried, so that whether all are understood does not depend on the layer.
    ignored = [pattern for pattern in rules.ignored_patterns if _matches(module, pattern)]
    matched = [pattern for pattern in rules.target_patterns if _matches(module, pattern)]
    if ignored or not rules.ignored_names.isdisjoint((module, class_)):
        return None
    found = [target for target in (module, *sorted(matched), class_) if target in rules.by_target]
    return rules.by_target[found[0]] if found else None


def _matches(module: str, pattern: str) -> bool:
    matches = matches_start(pattern.removeprefix(_REGEX), module)
    if matches is None:
        raise UnsupportedFormatError(f"regular expression {pattern[:200]!r} is not understood")
    return matches


@lru_cache(maxsize=4)
def _rules(config: QuantConfig) -> _Rules:
    by_target = {target: group for group in _groups(config.raw) for target in group.targets}
    ignored = _ignored(config.raw)
    return _Rules(
        by_target,
        tuple(target for target in by_target if target.startswith(_REGEX)),
        frozenset(ignored),
        tuple(name for name in ignored if name.startswith(_REGEX)),
    )


def _ignored(raw: Mapping[str, Any]) -> list[str]:
    return [] if raw.get("ignore") is None else fields.strings(raw, "ignore")


def _groups(raw: Mapping[str, Any]) -> list[_Group]:
    return [_group(name, value) for name, value in fields.section(raw, "config_groups").items()]


def _group(name: str, value: Any) -> _Group:
    """A group in full, as the name of a preset with a list of targets, or as the name of a preset for all."""
    if isinstance(value, list | str):
        preset, targets = (name, value) if isinstance(value, list) else (value, ["Linear"])
        value = {**_preset(preset), "targets": targets}
    if not isinstance(value, dict):
        raise CheckpointError(f"config_groups {name!r} is {value!r}, expected an object")
    with located(f"config_groups {name!r}"):
        weights = fields.section(value, "weights")
        return _Group(
            targets=tuple(fields.strings(value, "targets")),
            format=fields.text(value, "format", FORMATS[0]),
            weights=_weight_args(weights) if weights else None,
            activations=any(
                value.get(key) is not None for key in ("input_activations", "output_activations")
            ),
        )


def _weight_args(raw: Mapping[str, Any]) -> WeightArgs:
    kind, bits = fields.text(raw, "type", "int").lower(), fields.integer(raw, "num_bits", 8)
    if (kind, bits) != ("float", 8) and (kind != "int" or bits not in BITS):
        raise UnsupportedFormatError(
            f"weights of type {kind!r} with {bits} bits are not supported; what works: float with 8, int with one of "
            f"{BITS}"
        )
    size = fields.integer(raw, "group_size", 0)
    implied = "group" if size > 0 else "channel" if size else "tensor"
    strategy = fields.text(raw, "strategy", implied).lower()
    _known("strategy", strategy, _STRATEGIES)
    if strategy == "group":
        size = fields.positive(raw, "group_size")
    rows, columns = _block(raw)
    return WeightArgs(
        bits=bits,
        is_float=kind == "float",
        strategy=strategy,
        group_size={"group": size, "block": columns}.get(strategy, -1),
        block=(rows, columns),
        symmetric=fields.flag(raw, "symmetric", True),
        act_order=raw.get("actorder") is True or str(raw.get("actorder")).lower() in ("group", "dynamic"),
    )


def _block(raw: Mapping[str, Any]) -> tuple[int, int]:
    value = raw.get("block_structure")
    block = _BLOCK if value is None else value
    if isinstance(block, str):
        block = [int(part) if part.isascii() and part.isdigit() else 0 for part in block.split("x")]
    if not isinstance(block, list) or len(block) != 2 or not all(type(i) is int and i > 0 for i in block):
        raise CheckpointError(f"block_structure is {value!r}, expected the rows and columns of a block")
    return block[0], block[1]


def _preset(name: str) -> dict[str, Any]:
    """What a preset stands for (compressed-tensors 0.19, quant_scheme.py)."""
    upper = name.upper()
    weights = _PRESETS.get(upper)
    if weights is None:
        raise UnsupportedFormatError(
            f"quantisation preset {name!r} is not supported; what works: {', '.join(_PRESETS)}"
        )
    return {"weights": weights, "input_activations": None if "A16" in upper or not weights else {}}


def _by_bits(bits: int, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": "group", "group_size": 128, "symmetric": symmetric}


def _fp8(strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy}


_PRESETS: dict[str, dict[str, Any]] = {
    "UNQUANTIZED": {},
    **{f"W{bits}A{act}": _by_bits(bits) for bits in BITS for act in (4, 8, 16) if bits <= act},
    "W4A16_ASYM": _by_bits(4, symmetric=False),
    "W4AFP8": _by_bits(4),
    "W8A8": {"num_bits": 8, "strategy": "channel"},
    "INT8": {"num_bits": 8, "strategy": "channel"},
    "FP8": _fp8("tensor"),
    "FP8_DYNAMIC": _fp8("channel"),
    "FP8_BLOCK": _fp8("block"),
}


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value.lower() not in known:
        raise UnsupportedFormatError(
            f"{what} is {value!r}, which is not supported; what works: {', '.join(known)}; "
            "take another quantisation of this model"
        )
