"""config.json and generation_config.json of a model folder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.quant import fields
from appliance.quant.architectures import ARCHITECTURES
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.json_file import read_json
from appliance.quant.slots import ExpertSizes, Sizes


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json, checked to be of an architecture that runs.

    Raises:
        CheckpointError: it is missing or broken.
        UnsupportedFormatError: another architecture, or one that brings code of its own.
    """
    config = read_json(folder / "config.json")
    names = fields.strings(config, "architectures")
    if not any(name in ARCHITECTURES for name in names):
        known = ", ".join(ARCHITECTURES)
        code = " (it brings code of its own, which is never run)" if config.get("auto_map") else ""
        raise UnsupportedFormatError(
            f"{folder}: architecture {', '.join(names)!r}{code} is not supported; what works: {known}"
        )
    # Models that also see keep what is said of their text part in a section of its own.
    return {**config, **fields.section(config, "text_config"), "architectures": names}


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture of a checked configuration, as transformers names it."""
    return next(name for name in fields.strings(config, "architectures") if name in ARCHITECTURES)


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Raises CheckpointError where a size is missing, mistyped or impossible."""
    hidden = fields.positive(config, "hidden_size")
    heads = fields.positive(config, "num_attention_heads")
    head_dim = fields.positive(config, "head_dim", hidden // heads)
    return Sizes(
        layers=fields.positive(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.positive(config, "intermediate_size"),
        heads=heads,
        kv_heads=fields.positive(config, "num_key_value_heads", heads),
        key_dim=head_dim,
        value_dim=head_dim,
        vocab=fields.positive(config, "vocab_size"),
        experts=expert_sizes(config),
    )


def expert_sizes(config: Mapping[str, Any]) -> ExpertSizes | None:
    """The experts of an architecture that has some, with the keys of transformers 4 or 5.

    Raises:
        CheckpointError: a size is missing, mistyped or impossible.
    """
    experts = ARCHITECTURES[architecture(config)].experts
    if experts is None:
        return None
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    step = fields.positive(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(f"metadata 'mlp_only_layers' is {dense!r}, expected a list of layers")
    layers = range(step - 1, fields.positive(config, "num_hidden_layers"), step)
    return ExpertSizes(
        count=fields.positive(config, key),
        width=fields.positive(config, experts.width_key),
        layers=frozenset(layers).difference(dense),
    )


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends generation, of both configurations, sorted.

    Raises:
        CheckpointError: one of them is not in the vocabulary.
    """
    generation = folder / "generation_config.json"
    sources = [config] + ([read_json(generation)] if generation.is_file() else [])
    vocab = fields.positive(config, "vocab_size")
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token < vocab:
                raise CheckpointError(
                    f"{folder}: eos_token_id is {value!r}, expected ids below the vocabulary's size, {vocab}"
                )
            found.add(token)
    return tuple(sorted(found))
