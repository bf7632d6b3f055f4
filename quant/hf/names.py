"""Canonical names → names in a folder of transformers'. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from appliance.quant.architectures import Architecture, Experts
from appliance.quant.errors import CheckpointError

_WHOLE = {"embed": "embed_tokens", "final_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "qkv": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
# With norms after each block, the name that is otherwise the MLP's norm is the attention's.
_LAYER_POST_NORMS = _LAYER | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
# Where the decoder sits in a model.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
# What a text model does without: buffers, heads that guess several tokens ahead, encoders of images and sound, what a
# quantised cache needs.
_EXTRAS = (
    ("rotary_emb.inv_freq", "buffers"),
    ("mtp.", "a multi-token prediction head"),
    ("visual.", "a vision tower"),
    ("vision_tower.", "a vision tower"),
    ("vision_model.", "a vision tower"),
    ("multi_modal_projector.", "a vision tower"),
    ("audio_tower.", "an audio encoder"),
    ("self_attn.q_scale", "scales of a quantised key-value cache"),
    ("self_attn.k_scale", "scales of a quantised key-value cache"),
    ("self_attn.v_scale", "scales of a quantised key-value cache"),
    ("self_attn.q_zero_point", "scales of a quantised key-value cache"),
    ("self_attn.k_zero_point", "scales of a quantised key-value cache"),
    ("self_attn.v_zero_point", "scales of a quantised key-value cache"),
)


def decoder_prefix(tensors: Collection[str]) -> str:
    """What stands before `embed_tokens.weight`.

    Raises:
        CheckpointError: there is no embedding.
    """
    for prefix in _PREFIXES:
        if prefix + "embed_tokens.weight" in tensors:
            return prefix
    raise CheckpointError("tensor 'model.embed_tokens.weight' is missing")


def as_saved(architecture: Architecture, tensors: Collection[str]) -> Architecture:
    """With the name that the folder has for blocks of experts: transformers 5 calls every one `mlp` where it stacks
    experts."""
    experts = architecture.experts
    if experts is None or any(f".{experts.block}." in name for name in tensors):
        return architecture
    return replace(architecture, experts=replace(experts, block="mlp"))


def vector_name(name: str, prefix: str, architecture: Architecture) -> str:
    """E.g. `layers.3.q.bias` → `model.layers.3.self_attn.q_proj.bias`."""
    if name.endswith(".sinks"):
        return f"{prefix}layers.{name.split('.')[1]}.self_attn.sinks"
    suffix = ".bias" if name.endswith(".bias") else ".weight"
    return module_name(name.removesuffix(".bias"), prefix, architecture) + suffix


def module_name(name: str, prefix: str, architecture: Architecture) -> str:
    """E.g. `layers.3.q` → `model.layers.3.self_attn.q_proj`."""
    if name == "head":
        return "lm_head" if prefix != "language_model.model." else "language_model.lm_head"
    if name in _WHOLE:
        return prefix + _WHOLE[name]
    _, layer, stem, *expert = name.split(".")
    if architecture.experts is not None and stem in ("router", "experts"):
        return f"{prefix}layers.{layer}.{_expert_module(architecture.experts, expert)}"
    stems = _LAYER_POST_NORMS if architecture.post_norms else _LAYER
    return f"{prefix}layers.{layer}.{stems[stem]}"


def _expert_module(experts: Experts, expert: list[str]) -> str:
    """Of the router, or of a matrix of an expert, (number, name)."""
    if not expert:
        return f"{experts.block}.{experts.router}"
    number, matrix = expert
    matrices = {"gate": experts.gate, "up": experts.up, "down": experts.down}
    return f"{experts.block}.experts.{number}.{matrices[matrix]}"


def extra(tensor: str, prefix: str, prediction_layers: range) -> str:
    """What a tensor that no slot asks for belongs to, "" where it is not known to be harmless.

    Args:
        prediction_layers: the numbers under which heads that guess several tokens ahead are stored.
    """
    for part, what in _EXTRAS:
        if part in tensor:
            return what
    layer = tensor.removeprefix(f"{prefix}layers.").partition(".")[0]
    # Short enough to be a number of a layer: the digits of others take Python long to read.
    if layer.isascii() and layer.isdigit() and len(layer) < 9 and int(layer) in prediction_layers:
        return "a multi-token prediction head"
    return ""
