"""Gemma 2 and the text part of Gemma 3: scaled embeddings, windows that alternate, soft caps or two ropes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import (
    Metadata,
    WeightNames,
    but_every,
    config_head_dim,
    config_spec,
    config_window,
    config_windows,
    gguf_spec,
    gguf_windows,
)
from appliance.engine.families.ropes import config_rope
from appliance.engine.spec import Activation, DecoderSpec, LayerSpec, RopeSpec
from appliance.quant import fields

_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
# llama.cpp knows the models that scale scores by the width of a head's share by their number of layers.
_LAYERS_27B = {"gemma2": 46, "gemma3": 62}
_GGUF_KEYS = (
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)


def gemma2_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    """Every other layer, from the first on, has a window."""
    spec = _gemma(config, names, None)
    windows = config_windows(config, config_window(config, 4096), but_every(2, spec.num_layers))
    return replace(
        spec,
        layers=tuple(LayerSpec(window) for window in windows),
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(config, "final_logit_softcapping", 30.0),
    )


def gemma3_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    """All layers but every sixth have a window and a rope of their own."""
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            f"attn_logit_softcapping is {config['attn_logit_softcapping']!r}; Gemma 3 has none"
        )
    ropes = _config_ropes(config)
    spec = _gemma(config, names, ropes[0])
    pattern = fields.positive(config, "sliding_window_pattern", 6)
    windows = config_windows(config, config_window(config, 4096), but_every(pattern, spec.num_layers))
    return replace(
        spec,
        layers=_two_ropes(windows),
        ropes=ropes,
        logits_softcap=_softcap(config, "final_logit_softcapping", 0.0),
    )


def _gemma(config: Metadata, names: WeightNames, rope: RopeSpec | None) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is true; supported is causal attention alone")
    spec = config_spec(config, names, activation="hidden_activation", rope=rope)
    return replace(
        spec,
        attention_scale=fields.number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        embed_scale=spec.hidden_size**0.5,
    )


def _config_ropes(config: Metadata) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of windowed layers."""
    nested = fields.section(config, "rope_parameters")
    for key in nested.keys() - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"RoPE's {key} is {nested[key]!r}, which is not supported")
    full: Mapping[str, Any] = {
        **fields.section(nested, "full_attention"),
        **fields.section(config, "rope_scaling"),
    }
    head_dim = config_head_dim(config)
    theta = fields.number(config, "rope_theta", _GLOBAL_THETA)
    local_theta = fields.number(config, "rope_local_base_freq", _LOCAL_THETA)
    local = fields.section(nested, "sliding_attention")
    return (
        config_rope(config, head_dim, theta=theta, section=full),
        config_rope(config, head_dim, theta=local_theta, section=local),
    )


def _two_ropes(windows: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(window, 1 if window else 0) for window in windows)


def _softcap(metadata: Metadata, key: str, default: float) -> float:
    """0 where the file says null."""
    if key not in metadata:
        return default
    return 0.0 if metadata[key] is None else fields.number(metadata, key)


def gemma2_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    spec = _gemma_from_gguf(metadata, names)
    windows = gguf_windows(metadata, "gemma2.", spec.num_layers, 2, 4096)
    return replace(
        spec,
        layers=tuple(LayerSpec(window) for window in windows),
        attention_softcap=_softcap(metadata, "gemma2.attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(metadata, "gemma2.final_logit_softcapping", 30.0),
    )


def gemma3_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    spec = _gemma_from_gguf(metadata, names)
    theta = fields.number(metadata, "gemma3.rope.freq_base_swa", _LOCAL_THETA)
    return replace(
        spec,
        layers=_two_ropes(gguf_windows(metadata, "gemma3.", spec.num_layers, 6)),
        ropes=(*spec.ropes, RopeSpec(theta, spec.ropes[0].rotary_dim, original_context=spec.context_len)),
        logits_softcap=_softcap(metadata, "gemma3.final_logit_softcapping", 0.0),
    )


def _gemma_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    spec = gguf_spec(metadata, names, also=_GGUF_KEYS, activation=Activation.GELU_TANH)
    is_27b = spec.num_layers == _LAYERS_27B[spec.architecture]
    width = spec.hidden_size // spec.num_heads if is_27b else spec.head_dim
    return replace(spec, attention_scale=width**-0.5, embed_scale=spec.hidden_size**0.5)
