"""The one decoder: `DecoderSpec` → `StepProgram`. Imports no torch."""

from __future__ import annotations

from appliance.engine.program import (
    AddTo,
    Embed,
    KvWrite,
    Linear,
    Op,
    PagedAttention,
    RmsNorm,
    Rope,
    SiluMul,
    StepProgram,
)
from appliance.engine.spec import DecoderSpec


def build_program(spec: DecoderSpec) -> StepProgram:
    """A pre-norm transformer step from token ids to logits."""
    body: list[Op] = [Embed("embed", "x")]
    for layer in range(spec.num_layers):
        body += _layer(spec, layer)
    matrix = "embed" if spec.tied_head else "head"
    head = (RmsNorm("x", "final_norm", "normed", spec.norm_eps), Linear("normed", (matrix,), "logits"))
    return StepProgram(tuple(body), "x", head, "logits")


def _layer(spec: DecoderSpec, layer: int) -> list[Op]:
    p = f"layers.{layer}."
    return [
        RmsNorm("x", p + "attn_norm", "normed", spec.norm_eps),
        Linear("normed", (p + "q", p + "k", p + "v"), "qkv"),
        Rope("qkv"),
        KvWrite("qkv", layer),
        PagedAttention("qkv", layer, "attended", spec.attention_scale),
        Linear("attended", (p + "o",), "delta"),
        AddTo("delta", "x"),
        RmsNorm("x", p + "mlp_norm", "normed", spec.norm_eps),
        Linear("normed", (p + "gate", p + "up"), "gate_up"),
        SiluMul("gate_up", "gated"),
        Linear("gated", (p + "down",), "delta"),
        AddTo("delta", "x"),
    ]
