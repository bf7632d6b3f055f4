"""The one decoder: `DecoderSpec` → `StepProgram`. Imports no torch."""

from __future__ import annotations

from appliance.engine.program import (
    AddTo,
    Embed,
    Experts,
    GatedProduct,
    KvWrite,
    Linear,
    Op,
    PagedAttention,
    QKRmsNorm,
    RmsNorm,
    Rope,
    Route,
    ScaleLogits,
    StepProgram,
)
from appliance.engine.spec import DecoderSpec, ExpertSpec
from appliance.quant.architectures import QKNorm


def build_program(spec: DecoderSpec) -> StepProgram:
    """A transformer step from token ids to logits."""
    body: list[Op] = [Embed("embed", "x", spec.embed_scale)]
    for layer in range(spec.num_layers):
        p = f"layers.{layer}."
        body += _block(spec, p + "attn", _attention(spec, layer))
        body += _block(spec, p + "mlp", _mlp(spec, layer))
    matrix = "embed" if spec.tied_head else "head"
    head: list[Op] = [
        RmsNorm("x", "final_norm", "normed", spec.norm_eps),
        Linear("normed", (matrix,), "logits"),
    ]
    if spec.logits_scale != 1.0 or spec.logits_softcap:
        head.append(ScaleLogits("logits", spec.logits_scale, spec.logits_softcap))
    return StepProgram(tuple(body), "x", tuple(head), "logits")


def _block(spec: DecoderSpec, name: str, ops: list[Op]) -> list[Op]:
    """What turns the buffer `normed` into `delta`, between its norms, added to the residual stream."""
    before: list[Op] = [RmsNorm("x", name + "_norm", "normed", spec.norm_eps)] if spec.pre_norms else []
    after: list[Op] = (
        [RmsNorm("delta", name + "_post_norm", "delta", spec.norm_eps)] if spec.post_norms else []
    )
    return [*before, *ops, *after, AddTo("delta", "x", spec.residual_scale)]


def _attention(spec: DecoderSpec, layer: int) -> list[Op]:
    p, own = f"layers.{layer}.", spec.layers[layer]
    matrices = (p + "qkv",) if spec.fused else (p + "q", p + "k", p + "v")
    ops: list[Op] = [Linear(_input(spec), matrices, "qkv")]
    if spec.qk_norm is not QKNorm.NONE:
        whole = spec.qk_norm is QKNorm.WHOLE
        ops.append(QKRmsNorm("qkv", p + "q_norm", p + "k_norm", spec.norm_eps, whole))
    if own.rope is not None:
        ops.append(Rope("qkv", own.rope))
    return [
        *ops,
        KvWrite("qkv", layer),
        PagedAttention(
            "qkv",
            layer,
            "attended",
            spec.attention_scale,
            own.window,
            spec.attention_softcap,
            p + "sinks" if spec.sinks else "",
        ),
        Linear("attended", (p + "o",), "delta"),
    ]


def _mlp(spec: DecoderSpec, layer: int) -> list[Op]:
    p = f"layers.{layer}."
    if spec.experts is not None and layer in spec.experts.layers:
        return _experts(spec, spec.experts, p)
    matrices = (p + "gate_up",) if spec.fused else (p + "gate", p + "up")
    return [
        Linear(_input(spec), matrices, "gate_up"),
        GatedProduct("gate_up", "gated", spec.activation),
        Linear("gated", (p + "down",), "delta"),
    ]


def _experts(spec: DecoderSpec, experts: ExpertSpec, p: str) -> list[Op]:
    names = [f"{p}experts.{expert}." for expert in range(experts.count)]
    return [
        Linear(_input(spec), (p + "router",), "router_logits"),
        Route("router_logits", "chosen", "expert_weights", experts.top_k, experts.normalised),
        Experts(
            _input(spec),
            "chosen",
            "expert_weights",
            tuple((name + "gate", name + "up") for name in names),
            tuple((name + "down",) for name in names),
            "delta",
            experts.activation,
        ),
    ]


def _input(spec: DecoderSpec) -> str:
    """What a block reads."""
    return "normed" if spec.pre_norms else "x"
