"""Llama and the models that share its architecture (SmolLM2, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.spec import DecoderSpec, LayerSpec, RopeSpec
from appliance.quant import fields
from appliance.quant.gguf import metadata as meta

# Every `llama.*` key that is understood; any other might change what the model computes.
_READ = {
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.attention.value_length",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.vocab_size",
}
# Keys with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "llama.attention.causal": (True,),
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.rope.scaling.type": ("none",),
}


def llama_from_gguf(metadata: Mapping[str, Any], weight_names: frozenset[str]) -> DecoderSpec:
    """Read the `llama.*` keys of a GGUF file.

    Raises:
        UnsupportedModelError: a key that is not understood, or asks for what is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    for key, value in metadata.items():
        if key.startswith("llama.") and key not in _READ and value not in _NEUTRAL.get(key, ()):
            raise UnsupportedModelError(f"{key} is {value!r}, which is not supported")
    heads = fields.positive(metadata, "llama.attention.head_count")
    hidden = fields.positive(metadata, "llama.embedding_length")
    head_dim = fields.positive(metadata, "llama.attention.key_length", hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.positive(metadata, key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{key} is {metadata[key]}; supported is the head size, {head_dim}, alone"
            )
    return DecoderSpec(
        architecture="llama",
        vocab_size=len(fields.strings(metadata, meta.TOKENS_KEY)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.positive(metadata, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(metadata, "llama.feed_forward_length"),
        context_len=fields.positive(metadata, "llama.context_length"),
        norm_eps=fields.number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        layers=(LayerSpec(),) * fields.positive(metadata, "llama.block_count"),
        ropes=(RopeSpec(fields.number(metadata, "llama.rope.freq_base", 10_000.0), head_dim),),
        tied_head="head" not in weight_names,
        attention_scale=head_dim**-0.5,
    )


def llama_from_config(config: Mapping[str, Any], weight_names: frozenset[str]) -> DecoderSpec:
    """Read the config.json of a Llama, with the keys of transformers 4 or 5.

    Raises:
        UnsupportedModelError: a key asks for what is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    hidden = fields.positive(config, "hidden_size")
    heads = fields.positive(config, "num_attention_heads")
    head_dim = fields.positive(config, "head_dim", hidden // heads)
    activation = fields.text(config, "hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"hidden_act is {activation!r}; supported is silu")
    return DecoderSpec(
        architecture="llama",
        vocab_size=fields.positive(config, "vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.positive(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(config, "intermediate_size"),
        context_len=fields.positive(config, "max_position_embeddings"),
        norm_eps=fields.number(config, "rms_norm_eps"),
        layers=(LayerSpec(),) * fields.positive(config, "num_hidden_layers"),
        ropes=(RopeSpec(_rope_theta(config), head_dim),),
        tied_head="head" not in weight_names,
        attention_scale=head_dim**-0.5,
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    # transformers 5 has one section, 4 has a key for the base and a section for what rescales it.
    rope = {**fields.section(config, "rope_scaling"), **fields.section(config, "rope_parameters")}
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UnsupportedModelError(
            f"RoPE of its own for {', '.join(nested)} is not supported; supported is one for all"
        )
    kind = fields.text(rope, "rope_type", fields.text(rope, "type", "default"))
    if kind != "default":
        raise UnsupportedModelError(f"RoPE of type {kind!r} is not supported; supported is the default one")
    for key, source in (("partial_rotary_factor", config), ("partial_rotary_factor", rope)):
        if fields.number(source, key, 1.0) != 1.0:
            raise UnsupportedModelError(f"{key} is {source[key]}; supported is 1, whole heads are turned")
    return fields.number(rope, "rope_theta", fields.number(config, "rope_theta", 10_000.0))
