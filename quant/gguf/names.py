"""Canonical names → names in a GGUF file (llama.cpp, gguf-py/gguf/constants.py). No torch."""

from __future__ import annotations

_WHOLE = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
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
