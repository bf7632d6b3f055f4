"""Canonical names → names in a GGUF file (llama.cpp, gguf-py/gguf/constants.py). No torch."""

from __future__ import annotations

from appliance.quant.architectures import Architecture

_WHOLE = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "qkv": "attn_qkv",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
    # Phi-3's gates and ups are one matrix under the name of the ups.
    "gate_up": "ffn_up",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "sinks": "attn_sinks",
    "router": "ffn_gate_inp",
}
_EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def file_name(name: str, architecture: Architecture) -> str:
    """E.g. `layers.3.q.bias` → `blk.3.attn_q.bias`; of an expert, the name of the tensor that holds all of them."""
    if name in _WHOLE:
        return _WHOLE[name]
    suffix = "bias" if name.endswith(".bias") else "weight"
    _, layer, stem, *expert = name.removesuffix(".bias").split(".")
    if expert:
        return f"blk.{layer}.{_EXPERTS[expert[1]]}.{suffix}"
    return f"blk.{layer}.{architecture.gguf_mlp_norm if stem == 'mlp_norm' else _LAYER[stem]}.{suffix}"


def expert_number(name: str) -> int | None:
    """Which of a tensor's experts a name means; None for what belongs to no expert."""
    parts = name.split(".")
    return int(parts[3]) if parts[2:3] == ["experts"] else None
