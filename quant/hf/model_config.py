"""config.json of a model folder, and which tokens end generation. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.quant import fields
from appliance.quant.architectures import ARCHITECTURES
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.json_file import read_json
from appliance.quant.hf.tokenizer_files import TokenizerFiles
from appliance.quant.slots import ExpertSizes, Sizes

# What transformers' own classes fill in where published files leave it out.
_GEMMA3: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma2ForCausalLM": {"tie_word_embeddings": True},
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "MixtralForCausalLM": {"rope_theta": 1e6},
    "GptOssForCausalLM": {"rope_theta": 150_000.0},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 4096},
    "SmolLM3ForCausalLM": {"tie_word_embeddings": True},
}


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json, checked to be of an architecture that runs, with its class's defaults.

    Raises:
        CheckpointError: it is missing or broken.
        UnsupportedFormatError: another architecture, or one that brings code of its own.
    """
    config = read_json(folder / "config.json")
    names = fields.strings(config, "architectures")
    known_names = [name for name in names if name in ARCHITECTURES]
    if not known_names:
        known = ", ".join(ARCHITECTURES)
        code = " (it brings code of its own, which is never run)" if config.get("auto_map") else ""
        raise UnsupportedFormatError(
            f"{folder}: architecture {', '.join(names)!r}{code} is not supported; what works: {known}"
        )
    # Models that also see keep what is said of their text part in a section of its own.
    text = fields.section(config, "text_config")
    return {**_DEFAULTS.get(known_names[0], {}), **config, **text, "architectures": names}


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


def eos_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerFiles) -> tuple[int, ...]:
    """Every token that ends generation, of both configurations and of the tokeniser, sorted.

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
    text = tokenizer.named("eos_token") if tokenizer.definition else None
    if text:
        index = tokenizer.ids().get(text)
        if index is None or index >= vocab:
            raise CheckpointError(f"{folder}: eos_token is {text!r}, but the vocabulary has no such token")
        found.add(index)
    return tuple(sorted(found))
