"""What the metadata of families with experts have in common."""

from __future__ import annotations

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families.common import Metadata
from appliance.engine.spec import Activation, ExpertSpec
from appliance.quant import fields
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf import metadata as meta
from appliance.quant.hf import model_config

# Keys of GGUF, after the architecture and a dot.
GGUF_EXPERT_KEYS = (
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("expert_gating_func", "expert_weights_norm", "expert_weights_scale", "expert_shared_count"),
)
# Of these, the ones that may ask for something else, with the values that do not: 1 is softmax.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_gating_func": (1,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0,),
    "expert_shared_count": (0,),
}


def gguf_experts(metadata: Metadata) -> ExpertSpec:
    """The experts of a model whose every layer has some, with weights that sum to one.

    Raises:
        UnsupportedModelError: a key asks for what is not supported.
        CheckpointError: a key is missing, mistyped or impossible.
    """
    architecture = fields.text(metadata, "general.architecture")
    prefix = architecture + "."
    for key, values in _NEUTRAL.items():
        if metadata.get(prefix + key) not in (None, *values):
            raise UnsupportedModelError(
                f"{prefix + key} is {metadata[prefix + key]!r}; supported is {values[0]}"
            )
    sizes = meta.expert_sizes(metadata, architecture)
    if sizes is None:
        raise CheckpointError(f"metadata {prefix + 'expert_count'!r} is missing, expected at least 1")
    return ExpertSpec(
        count=sizes.count,
        top_k=fields.positive(metadata, prefix + "expert_used_count"),
        normalised=True,
        layers=sizes.layers,
    )


def config_experts(config: Metadata, *, activation: Activation, normalised: bool) -> ExpertSpec:
    """The experts of a config.json, with the keys of transformers 4 or 5.

    Raises:
        CheckpointError: a key is missing, mistyped or impossible.
    """
    sizes = model_config.expert_sizes(config)
    assert sizes is not None
    return ExpertSpec(
        count=sizes.count,
        top_k=fields.positive(config, "num_experts_per_tok"),
        normalised=normalised,
        layers=sizes.layers,
        activation=activation,
    )
