"""The decoder families whose weights are read: what a layer of each has, and what files call it. No torch.

Canonical names of a layer's weights, each after `layers.{i}.`: the norms `attn_norm` and `mlp_norm` before a block and
`attn_post_norm` and `mlp_post_norm` after it; `q`, `k`, `v` or one `qkv`; `q_norm`, `k_norm`, `sinks`; `o`; `gate`,
`up` or one `gate_up`; `down`. Where experts are chosen from, `router` and `experts.{e}.` + `gate`, `up`, `down`. A norm
holds the whole factor, whatever a file adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class QKNorm(Enum):
    """Over what queries and keys are normalised."""

    NONE = "none"
    HEAD = "head"
    """Each head on its own; the weight has head_dim elements."""
    WHOLE = "whole"
    """All heads of a token together."""


@dataclass(frozen=True, slots=True)
class Experts:
    """How folders of transformers' name and store the experts of a layer.

    Attributes:
        block: what holds the router and the experts.
        router: its name in the block.
        gate, up, down: names of an expert's matrices where each is a module of its own.
        interleaved: where experts are stacked, each is stored [inputs, outputs] and gates and ups take turns; else
            [outputs, inputs], all gates before all ups.
        biases: router and experts have them.
        width_key: key of config.json with the rows of a gate.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    biases: bool = False
    width_key: str = "intermediate_size"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the weights of a family are.

    Attributes:
        gguf: `general.architecture` in GGUF files.
        pre_norms, post_norms: whether norms stand before and after attention and MLP.
        fused: queries, keys and values are one matrix, gates and ups another.
        norm_offset: what folders of transformers leave out of norms.
        gguf_permutes: GGUF files interleave the two halves of each query and key head, for llama.cpp's RoPE.
        gguf_mlp_norm: GGUF files' name of `mlp_norm`.
        experts: None where every layer has one MLP.
        sinks: each head has one more logit, which attends to nothing.
    """

    gguf: str
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    fused: bool = False
    norm_offset: float = 0.0
    gguf_permutes: bool = False
    gguf_mlp_norm: str = "ffn_norm"
    experts: Experts | None = None
    sinks: bool = False


_LLAMA = Architecture("llama", gguf_permutes=True)
_GEMMA2 = Architecture("gemma2", post_norms=True, norm_offset=1.0)
_GEMMA3 = Architecture("gemma3", post_norms=True, norm_offset=1.0, qk_norm=QKNorm.HEAD)

ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", qk_norm=QKNorm.HEAD),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Architecture("phi3", fused=True),
    "GraniteForCausalLM": Architecture("granite", gguf_permutes=True),
    "Olmo2ForCausalLM": Architecture("olmo2", pre_norms=False, post_norms=True, qk_norm=QKNorm.WHOLE),
    "SmolLM3ForCausalLM": Architecture("smollm3", gguf_permutes=True),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe", qk_norm=QKNorm.HEAD, experts=Experts(width_key="moe_intermediate_size")
    ),
    "MixtralForCausalLM": replace(_LLAMA, experts=Experts("block_sparse_moe", "gate", "w1", "w3", "w2")),
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        gguf_mlp_norm="post_attention_norm",
        experts=Experts(router="router", interleaved=True, biases=True),
        sinks=True,
    ),
}
"""By the name in `architectures` of a config.json."""

GGUF_ARCHITECTURES = {architecture.gguf: name for name, architecture in reversed(ARCHITECTURES.items())}
"""`general.architecture` of a GGUF file → the name above (of several, the first)."""
