"""What the metadata of every family has: the spec of a plain decoder, which a family's parser then changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.ropes import config_rope, gguf_rope
from appliance.engine.spec import Activation, DecoderSpec, LayerSpec, RopeSpec
from appliance.quant import fields
from appliance.quant.architectures import ARCHITECTURES, GGUF_ARCHITECTURES, Architecture
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf import metadata as meta

Metadata = Mapping[str, Any]
WeightNames = frozenset[str]

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
# Every key after `<architecture>.` that is understood; any other might change what the model computes.
_GGUF_READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    # How Meta's own files were laid out before they were converted.
    "tensor_data_layout",
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
# Keys with the values that change nothing.
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
}


def config_spec(
    config: Metadata,
    names: WeightNames,
    *,
    activation: str = "hidden_act",
    rope: RopeSpec | None = None,
) -> DecoderSpec:
    """The decoder that a config.json describes, with the keys of transformers 4 or 5.

    Args:
        names: canonical, of the weights that are there.
        activation: the key that names it.
        rope: where it isn't described as in most families.

    Raises:
        UnsupportedModelError: a key asks for what is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    architecture = next(
        ARCHITECTURES[n] for n in fields.strings(config, "architectures") if n in ARCHITECTURES
    )
    head_dim = config_head_dim(config)
    rope = rope or config_rope(config, head_dim)
    heads = fields.positive(config, "num_attention_heads")
    return _spec(
        architecture,
        names,
        rope,
        fields.positive(config, "max_position_embeddings"),
        vocab_size=fields.positive(config, "vocab_size"),
        hidden_size=fields.positive(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.positive(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(config, "intermediate_size"),
        norm_eps=fields.number(config, "rms_norm_eps"),
        layers=(LayerSpec(),) * fields.positive(config, "num_hidden_layers"),
        attention_scale=head_dim**-0.5,
        activation=_activation(config, activation),
    )


def config_head_dim(config: Metadata) -> int:
    share = fields.positive(config, "hidden_size") // fields.positive(config, "num_attention_heads")
    return fields.positive(config, "head_dim", share)


def but_every(period: int, layers: int) -> list[bool]:
    """False for the last layer of every `period`."""
    return [(layer + 1) % period != 0 for layer in range(layers)]


def config_windows(config: Metadata, window: int | None, windowed: Sequence[bool]) -> tuple[int, ...]:
    """The window of each layer.

    Args:
        window: None: there is none.
        windowed: which layers have it where the file does not list their types.
    """
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != len(windowed):
            found = len(types) if isinstance(types, list) else repr(types)[:80]
            raise CheckpointError(f"layer_types is {found}, expected an array of {len(windowed)}")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(
                    f"layer_types names {kind!r}; what works: full_attention, sliding_attention"
                )
        windowed = [kind == "sliding_attention" for kind in types]
        if any(windowed) and window is None:
            raise CheckpointError("layer_types names 'sliding_attention', but there is no sliding_window")
    return tuple(window if own and window is not None else 0 for own in windowed)


def config_window(config: Metadata, default: int | None = None) -> int | None:
    """`sliding_window`; null says that there is none."""
    if "sliding_window" not in config:
        return default
    return None if config["sliding_window"] is None else fields.positive(config, "sliding_window")


def gguf_spec(
    metadata: Metadata,
    names: WeightNames,
    *,
    also: Sequence[str] = (),
    activation: Activation = Activation.SILU,
) -> DecoderSpec:
    """The decoder that the metadata of a GGUF file describes.

    Args:
        also: keys that the family's parser reads.

    Raises:
        UnsupportedModelError: a key that is not understood, or asks for what is not supported.
        CheckpointError: a key is missing or mistyped.
    """
    name = fields.text(metadata, "general.architecture")
    architecture, prefix = ARCHITECTURES[GGUF_ARCHITECTURES[name]], name + "."
    _check_keys(metadata, prefix, also)
    heads = fields.positive(metadata, prefix + "attention.head_count")
    hidden = fields.positive(metadata, prefix + "embedding_length")
    head_dim = fields.positive(metadata, prefix + "attention.key_length", hidden // heads)
    rope = gguf_rope(metadata, prefix, head_dim)
    same = {prefix + "attention.value_length": head_dim}
    if architecture.gguf_permutes:
        same[prefix + "rope.dimension_count"] = head_dim
    for key, size in same.items():
        if fields.positive(metadata, key, size) != size:
            raise UnsupportedModelError(
                f"{key} is {metadata[key]}; supported is the head size, {size}, alone"
            )
    return _spec(
        architecture,
        names,
        rope,
        fields.positive(metadata, prefix + "context_length"),
        vocab_size=len(fields.strings(metadata, meta.TOKENS_KEY)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.positive(metadata, prefix + "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=fields.positive(metadata, prefix + "feed_forward_length"),
        norm_eps=fields.number(metadata, prefix + "attention.layer_norm_rms_epsilon"),
        layers=(LayerSpec(),) * fields.positive(metadata, prefix + "block_count"),
        attention_scale=head_dim**-0.5,
        activation=activation,
    )


def _check_keys(metadata: Metadata, prefix: str, also: Sequence[str]) -> None:
    """Raises UnsupportedModelError at a key of the architecture that nobody reads."""
    for key, value in metadata.items():
        own = key.removeprefix(prefix)
        if (
            own != key
            and own not in _GGUF_READ
            and own not in also
            and value not in _GGUF_NEUTRAL.get(own, ())
        ):
            raise UnsupportedModelError(f"{key} is {value!r}, which is not supported")


def gguf_windows(
    metadata: Metadata, prefix: str, layers: int, period: int, window: int = 0
) -> tuple[int, ...]:
    """The window of each layer: none in the last of every `period`, unless the file says otherwise.

    Args:
        window: where the file names none.
    """
    window = fields.integer(metadata, prefix + "attention.sliding_window", window)
    key = prefix + "attention.sliding_window_pattern"
    listed = metadata.get(key)
    if isinstance(listed, list):
        if len(listed) != layers:
            raise CheckpointError(f"metadata {key!r} has {len(listed)} entries, expected {layers}")
        return tuple(window if own else 0 for own in listed)
    windowed = but_every(fields.positive(metadata, key, period), layers)
    return tuple(window if own else 0 for own in windowed)


def _spec(
    architecture: Architecture, names: WeightNames, rope: RopeSpec, longest: int, **values: Any
) -> DecoderSpec:
    """What the architecture says of the weights, and how far RoPE reaches, beside what was read.

    Where frequencies differ between short and long contexts, the default is to serve the original context, in which
    every token is turned as transformers turns it.
    """
    context_len, stretched = longest, 0
    if rope.kind == "yarn":
        context_len = max(longest, int(rope.original_context * rope.factor))
    elif rope.kind == "dynamic":
        stretched = int(longest * rope.factor)
    elif rope.factors[0] != rope.factors[1] and longest > rope.original_context:
        context_len, stretched = rope.original_context, longest
    return DecoderSpec(
        architecture=architecture.gguf,
        context_len=context_len,
        stretched_context_len=stretched,
        ropes=(rope,),
        tied_head="head" not in names,
        pre_norms=architecture.pre_norms,
        post_norms=architecture.post_norms,
        qk_norm=architecture.qk_norm,
        fused=architecture.fused,
        **values,
    )


def _activation(config: Metadata, key: str) -> Activation:
    name = fields.text(config, key, "gelu_pytorch_tanh" if key == "hidden_activation" else "silu")
    if name not in _ACTIVATIONS:
        works = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"{key} is {name!r}, which is not supported; what works: {works}")
    return _ACTIVATIONS[name]
