"""Llama and the models that share its architecture (SmolLM2, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.spec import DecoderSpec


def llama_from_gguf(metadata: Mapping[str, Any], weight_names: frozenset[str]) -> DecoderSpec:
    """Read the `llama.*` keys of a GGUF file."""
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(
            f"llama.rope.scaling.type is {scaling!r}; only models without rope scaling run"
        )
    if metadata.get("llama.expert_count", 0):
        raise UnsupportedModelError("llama.expert_count is set; mixtures of experts are not supported")
    heads = _integer(metadata, "llama.attention.head_count")
    hidden = _integer(metadata, "llama.embedding_length")
    head_dim = _integer(metadata, "llama.attention.key_length", hidden // heads)
    if _integer(metadata, "llama.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError("keys and values of different head sizes are not supported")
    return DecoderSpec(
        architecture="llama",
        vocab_size=_integer(metadata, "llama.vocab_size", len(metadata["tokenizer.ggml.tokens"])),
        hidden_size=hidden,
        num_layers=_integer(metadata, "llama.block_count"),
        num_heads=heads,
        num_kv_heads=_integer(metadata, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_integer(metadata, "llama.feed_forward_length"),
        context_len=_integer(metadata, "llama.context_length"),
        norm_eps=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
        rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
        rotary_dim=_integer(metadata, "llama.rope.dimension_count", head_dim),
        tied_head="head" not in weight_names,
    )


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{key} is {value!r}, expected a positive integer")
    return value
