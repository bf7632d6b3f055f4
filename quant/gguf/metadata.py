"""What GGUF's metadata says of the vocabulary and of experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.quant.errors import CheckpointError
from appliance.quant.fields import integer, positive, strings
from appliance.quant.slots import ExpertSizes

# The token that ends a document, a turn, a message: generation stops at any of them.
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
TOKENS_KEY = "tokenizer.ggml.tokens"
ROPE_FACTOR_KEYS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""What divides RoPE's frequencies, for all contexts, for short and for long ones: tensors, read as metadata."""


def token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    """The token that `key` names, None where the key is absent.

    Raises:
        CheckpointError: it is not in the vocabulary.
    """
    if key not in metadata:
        return None
    value = integer(metadata, key)
    if not 0 <= value < vocab_size:
        raise CheckpointError(f"metadata {key!r} is {value}, but the vocabulary has {vocab_size} tokens")
    return value


def expert_sizes(metadata: Mapping[str, Any], architecture: str) -> ExpertSizes | None:
    """The experts of a model that has some, in every layer.

    Raises:
        CheckpointError: a size is missing, mistyped or impossible.
    """
    count = integer(metadata, f"{architecture}.expert_count", 0)
    if not count:
        return None
    return ExpertSizes(
        count=positive(metadata, f"{architecture}.expert_count"),
        width=positive(
            metadata,
            f"{architecture}.expert_feed_forward_length",
            integer(metadata, f"{architecture}.feed_forward_length"),
        ),
        layers=frozenset(range(positive(metadata, f"{architecture}.block_count"))),
    )


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends generation, sorted.

    Raises:
        CheckpointError: one of them is not in the vocabulary.
    """
    vocab_size = len(strings(metadata, TOKENS_KEY))
    ids = {token_id(metadata, key, vocab_size) for key in EOS_KEYS}
    return tuple(sorted(token for token in ids if token is not None))
