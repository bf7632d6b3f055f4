"""Typed access to GGUF metadata: a missing or mistyped key is an error that names it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.quant.errors import CheckpointError

# The token that ends a document, a turn, a message: generation stops at any of them.
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
TOKENS_KEY = "tokenizer.ggml.tokens"


def text(metadata: Mapping[str, Any], key: str) -> str:
    value = _required(metadata, key, "a string")
    if not isinstance(value, str):
        raise _mistyped(key, value, "a string")
    return value


def integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The value of `key`, or the default where there is one and the key is absent."""
    value = metadata.get(key, default)
    if value is None:
        value = _required(metadata, key, "an integer")
    if not isinstance(value, int) or isinstance(value, bool):
        raise _mistyped(key, value, "an integer")
    return value


def positive(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = integer(metadata, key, default)
    if value < 1:
        raise CheckpointError(f"metadata {key!r} is {value}, expected at least 1")
    return value


def number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive, finite number."""
    value = metadata.get(key, default)
    if value is None:
        value = _required(metadata, key, "a number")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _mistyped(key, value, "a positive number")
    return float(value)


def strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = _required(metadata, key, "an array of strings")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _mistyped(key, value, "an array of strings")
    return value


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


def eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends generation, sorted.

    Raises:
        CheckpointError: one of them is not in the vocabulary.
    """
    vocab_size = len(strings(metadata, TOKENS_KEY))
    ids = {token_id(metadata, key, vocab_size) for key in EOS_KEYS}
    return tuple(sorted(token for token in ids if token is not None))


def _required(metadata: Mapping[str, Any], key: str, expected: str) -> Any:
    if key not in metadata:
        raise CheckpointError(f"metadata {key!r} is missing, expected {expected}")
    return metadata[key]


def _mistyped(key: str, value: Any, expected: str) -> CheckpointError:
    found = f"an array of {len(value)}" if isinstance(value, list) else repr(value)[:80]
    return CheckpointError(f"metadata {key!r} is {found}, expected {expected}")
