"""Granite: a Llama with four factors."""

from __future__ import annotations

from dataclasses import replace

from appliance.engine.families.common import Metadata, WeightNames, config_spec, gguf_spec
from appliance.engine.spec import DecoderSpec
from appliance.quant import fields

_GGUF_KEYS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")


def granite_from_config(config: Metadata, names: WeightNames) -> DecoderSpec:
    return replace(
        config_spec(config, names),
        attention_scale=fields.number(config, "attention_multiplier", 1.0),
        embed_scale=fields.number(config, "embedding_multiplier", 1.0),
        residual_scale=fields.number(config, "residual_multiplier", 1.0),
        logits_scale=1 / fields.number(config, "logits_scaling", 1.0),
    )


def granite_from_gguf(metadata: Metadata, names: WeightNames) -> DecoderSpec:
    """`granite.logit_scale` divides."""
    # True is what an absent key stands for; false switches RoPE off.
    known = {k: v for k, v in metadata.items() if (k, v) != ("granite.rope.scaling.finetuned", True)}
    spec = gguf_spec(known, names, also=_GGUF_KEYS)
    return replace(
        spec,
        attention_scale=fields.number(metadata, "granite.attention.scale", spec.attention_scale),
        embed_scale=fields.number(metadata, "granite.embedding_scale", 1.0),
        residual_scale=fields.number(metadata, "granite.residual_scale", 1.0),
        logits_scale=1 / fields.number(metadata, "granite.logit_scale"),
    )
