"""What GGUF's metadata says of the vocabulary and of experts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.quant.errors import CheckpointError
from appliance.quant.fields import integer, positive, strings
from appliance.quant.slots import ExpertSizes

BOS_KEY, EOS_KEY = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
# The token that ends a document, a turn, a message: generation stops at any of them.
EOS_KEYS = (EOS_KEY, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Control tokens that end a turn whether the file says so or not; many files only name the one that ends a document.
_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
)
_CONTROL = 3
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
    """Every token that ends generation, sorted: those that the file names, and control tokens that end a turn.

    Raises:
        CheckpointError: one of them is not in the vocabulary.
    """
    tokens = strings(metadata, TOKENS_KEY)
    types = metadata.get("tokenizer.ggml.token_type") or ()
    ids = {token_id(metadata, key, len(tokens)) for key in EOS_KEYS}
    ends = {text: index for index, text in enumerate(tokens) if text in _ENDS}
    if "<|return|>" in ends:
        # In gpt-oss's format this ends a part of an answer, not the answer.
        ends.pop("<|end|>", None)
    ids |= {index for index in ends.values() if index < len(types) and types[index] == _CONTROL}
    return tuple(sorted(token for token in ids if token is not None))
