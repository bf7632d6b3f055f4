"""Canonical names → names in a GGUF file (llama.cpp, gguf-py/gguf/constants.py). No torch."""

from __future__ import annotations

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
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    # Phi-3's gates and ups are one matrix under the name of the ups.
    "gate_up": "ffn_up",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def file_name(name: str) -> str:
    """E.g. `layers.3.q.bias` → `blk.3.attn_q.bias`."""
    if name in _WHOLE:
        return _WHOLE[name]
    _, layer, stem, *bias = name.split(".")
    return f"blk.{layer}.{_LAYER[stem]}.{'bias' if bias else 'weight'}"
