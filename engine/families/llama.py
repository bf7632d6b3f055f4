"""Llama and the models that share its architecture (SmolLM2, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.spec import DecoderSpec
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
        num_layers=fields.positive(metadata, "llama.block_count"),
        num_heads=heads,
        num_kv_heads=fields.positive(metadata, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(metadata, "llama.feed_forward_length"),
        context_len=fields.positive(metadata, "llama.context_length"),
        norm_eps=fields.number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number(metadata, "llama.rope.freq_base", 10_000.0),
        rotary_dim=head_dim,
        tied_head="head" not in weight_names,
    )
