"""RoPE in the metadata of folders and of GGUF files → `RopeSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.spec import RopeSpec
from appliance.quant import fields
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.metadata import ROPE_FACTOR_KEYS

# Keys of a section that describes RoPE; any other might change what the model computes.
_KEYS = {
    *(
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
    ),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    # Whether the model was trained with the scaling: changes nothing.
    "finetuned",
}
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Beyond these a configuration is broken: no model comes near.
_MAX_FACTOR = 1e6
_MAX_CONTEXT = 1 << 28


def config_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    theta: float = 10_000.0,
    partial: bool = False,
    section: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """RoPE of a config.json, with the keys of transformers 4 or 5.

    Args:
        theta: the base where the file names none.
        partial: whether the family turns parts of heads.
        section: what describes it, where the file has several.

    Raises:
        UnsupportedModelError: a kind or a key that is not supported.
        CheckpointError: a key is missing, mistyped or impossible.
    """
    # transformers 5 has one section, 4 has keys for the base and the part, and a section for what rescales it.
    rope = section
    if rope is None:
        # Beside a section of transformers 5, one of 4 was added by hand, and is what transformers goes by.
        scaling = fields.section(config, "rope_scaling")
        rope = scaling or fields.section(config, "rope_parameters")
        theta = fields.number(config, "rope_theta", theta)
        theta = fields.number(fields.section(config, "rope_parameters"), "rope_theta", theta)
    for key in rope.keys() - _KEYS:
        raise UnsupportedModelError(f"RoPE's {key} is {rope[key]!r}, which is not supported")
    kind = fields.text(rope, "rope_type", fields.text(rope, "type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"RoPE of type {kind!r} is not supported; what works: {', '.join(_KINDS)}"
        )
    share = _share(config, rope, partial)
    context = fields.positive(config, "max_position_embeddings")
    original = context if kind == "dynamic" else _original_context(config, rope, context)
    factor = 1.0 if kind == "default" else fields.number(rope, "factor", _implied(kind, context / original))
    return _sound(
        theta=fields.number(rope, "rope_theta", theta),
        rotary_dim=_even(int(head_dim * share)),
        kind=kind,
        factor=factor,
        original_context=original,
        attention_factor=_attention_factor(rope, kind, factor, original),
        parameters=_parameters(rope, kind),
        factors=_factors(rope, head_dim, share) if kind == "longrope" else ((), ()),
    )


def _share(config: Mapping[str, Any], rope: Mapping[str, Any], partial: bool) -> float:
    """The part of each head that is turned."""
    share = fields.number(rope, "partial_rotary_factor", fields.number(config, "partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        raise UnsupportedModelError(
            f"partial_rotary_factor is {share:g}; supported is 1, whole heads are turned"
        )
    if share > 1.0:
        raise CheckpointError(f"partial_rotary_factor is {share:g}, expected at most 1")
    return share


def _original_context(config: Mapping[str, Any], rope: Mapping[str, Any], context: int) -> int:
    """The key beside the section comes first, as in transformers."""
    inner = fields.positive(rope, "original_max_position_embeddings", context)
    return fields.positive(config, "original_max_position_embeddings", inner)


def _implied(kind: str, ratio: float) -> float | None:
    """The factor of kinds that do without."""
    return ratio if kind in ("yarn", "longrope") else None


def _attention_factor(rope: Mapping[str, Any], kind: str, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return fields.number(rope, "attention_factor")
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 < original else 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (fields.number(rope, key) for key in ("mscale", "mscale_all_dim"))
        return _yarn_scale(factor, above) / _yarn_scale(factor, below)
    return _yarn_scale(factor)


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _parameters(rope: Mapping[str, Any], kind: str) -> tuple[tuple[str, float], ...]:
    if kind == "llama3":
        low, high = (fields.number(rope, key) for key in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise CheckpointError(
                f"low_freq_factor is {low:g}, expected less than high_freq_factor, {high:g}"
            )
        return (("low_freq_factor", low), ("high_freq_factor", high))
    if kind == "yarn":
        # Zero counts as absent, as in transformers.
        fast = fields.number(rope, "beta_fast") if rope.get("beta_fast") else 32.0
        slow = fields.number(rope, "beta_slow") if rope.get("beta_slow") else 1.0
        return (("beta_fast", fast), ("beta_slow", slow), ("truncate", fields.flag(rope, "truncate", True)))
    return ()


def _factors(
    rope: Mapping[str, Any], head_dim: int, share: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    pair = (fields.numbers(rope, "short_factor"), fields.numbers(rope, "long_factor"))
    return _checked(pair, _even(int(head_dim * share)))


def gguf_rope(metadata: Mapping[str, Any], prefix: str, head_dim: int) -> RopeSpec:
    """RoPE of a GGUF file.

    Args:
        prefix: the architecture and a dot.

    Raises:
        UnsupportedModelError: a kind that is not supported.
        CheckpointError: a key is missing, mistyped or impossible.
    """
    scaling = prefix + "rope.scaling."
    factor = fields.number(metadata, scaling + "factor", 1.0)
    kind = fields.text(metadata, scaling + "type", "linear" if factor != 1.0 else "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{scaling}type is {kind!r}, which is not supported; what works: none, linear, yarn, longrope"
        )
    rotary_dim = _even(fields.positive(metadata, prefix + "rope.dimension_count", head_dim))
    if rotary_dim > head_dim:
        raise CheckpointError(
            f"metadata {prefix + 'rope.dimension_count'!r} is {rotary_dim}, expected at most {head_dim}"
        )
    factors = _gguf_factors(metadata, rotary_dim)
    if factors[0]:
        if kind not in ("none", "longrope"):
            raise UnsupportedModelError(f"{scaling}type is {kind!r} beside a tensor of RoPE's factors")
        kind = "longrope"
    elif kind == "longrope":
        raise CheckpointError(f"{scaling}type is 'longrope', but the tensors of its factors are missing")
    context = fields.positive(metadata, prefix + "context_length")
    attention_factor = fields.number(metadata, scaling + "attn_factor", 1.0)
    if kind == "yarn":
        # llama.cpp multiplies by what the paper advises, and by what the file says.
        attention_factor *= _yarn_scale(factor)
    return _sound(
        theta=fields.number(metadata, prefix + "rope.freq_base", 10_000.0),
        rotary_dim=rotary_dim,
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_context=fields.positive(metadata, scaling + "original_context_length", context),
        attention_factor=attention_factor,
        parameters=_gguf_yarn(metadata, scaling) if kind == "yarn" else (),
        factors=factors,
    )


def _gguf_yarn(metadata: Mapping[str, Any], scaling: str) -> tuple[tuple[str, float], ...]:
    fast = fields.number(metadata, scaling + "yarn_beta_fast", 32.0)
    slow = fields.number(metadata, scaling + "yarn_beta_slow", 1.0)
    return (("beta_fast", fast), ("beta_slow", slow), ("truncate", 1.0))


def _gguf_factors(
    metadata: Mapping[str, Any], rotary_dim: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For short and for long contexts, empty where the file has none."""
    both, short, long = ROPE_FACTOR_KEYS
    if both in metadata:
        factors = fields.numbers(metadata, both)
        return _checked((factors, factors), rotary_dim)
    if short in metadata or long in metadata:
        return _checked((fields.numbers(metadata, short), fields.numbers(metadata, long)), rotary_dim)
    return ((), ())


def _sound(**values: Any) -> RopeSpec:
    """A spec whose formula has a value."""
    rope = RopeSpec(**values)
    for key, value in (("factor", rope.factor), *rope.parameters):
        if value > _MAX_FACTOR or 0 < value < 1 / _MAX_FACTOR:
            raise CheckpointError(
                f"RoPE's {key} is {value:g}, expected {1 / _MAX_FACTOR:g} to {_MAX_FACTOR:g}"
            )
    if rope.original_context > _MAX_CONTEXT:
        raise CheckpointError(
            f"RoPE's original context is {rope.original_context} tokens, expected at most {_MAX_CONTEXT}"
        )
    if rope.theta <= 1.0:
        raise CheckpointError(f"RoPE's base is {rope.theta:g}, expected more than 1")
    if rope.kind == "dynamic" and rope.rotary_dim < 4:
        raise CheckpointError(f"dynamic RoPE turns {rope.rotary_dim} elements of a head, expected at least 4")
    return rope


def _even(rotary_dim: int) -> int:
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(f"RoPE turns {rotary_dim} elements of a head, expected an even number")
    return rotary_dim


def _checked(
    factors: tuple[tuple[float, ...], tuple[float, ...]], rotary_dim: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    for each in factors:
        if len(each) != rotary_dim // 2:
            raise CheckpointError(f"RoPE has {len(each)} factors, expected {rotary_dim // 2}")
    return factors
