"""The tokeniser that a GGUF file carries. No torch.

Byte-level BPE (`tokenizer.ggml.model` = `gpt2`). `tokenizer.ggml.pre` names how text is cut before merging;
a name that is not known is refused: a guess would quietly give other ids than the model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers.models import BPE

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.file import GGUFFile
from appliance.text.vocabulary import Vocabulary, byte_level_bytes

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# As in Llama 3's tokenizer.json.
_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before merging, and what goes with it where the metadata is silent."""

    steps: tuple[Any, ...]
    adds_bos: bool = False
    ignores_merges: bool = False


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer((_BYTE_LEVEL,)),
    "smollm": _PreTokenizer((pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL)),
    "llama-bpe": _PreTokenizer(
        (
            pre_tokenizers.Split(Regex(_LLAMA3_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ),
        adds_bos=True,
        ignores_merges=True,
    ),
}


def read_gguf(path: str | Path) -> Vocabulary:
    """The tokeniser of a GGUF file.

    Raises:
        CheckpointError: the vocabulary is missing or contradicts itself.
        UnsupportedFormatError: a tokeniser model or pre-tokeniser that is not known.
    """
    with GGUFFile(path) as file, located(path):
        return from_metadata(file.metadata)


def from_metadata(metadata: Mapping[str, Any]) -> Vocabulary:
    """The same of the metadata of a file that is already open."""
    model, pre = fields.text(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedFormatError(f"tokeniser model {model!r} is not supported; what works: gpt2")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedFormatError(f"pre-tokeniser {pre!r} is not supported; what works: {known}")
    rules = _PRE_TOKENIZERS[pre]
    tokens = fields.strings(metadata, meta.TOKENS_KEY)
    types = _types(metadata, len(tokens))
    eos_ids = meta.eos_token_ids(metadata)
    bos_id = meta.token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens))
    control = {i: tokens[i] for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    token_bytes = {
        index: text.encode() if kind == _USER_DEFINED else byte_level_bytes(text)
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if index not in control
    }
    bpe = _bpe(tokens, fields.strings(metadata, "tokenizer.ggml.merges"), rules.ignores_merges)
    user_defined = _added((tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED), special=False)
    named = {"bos_token": bos_id, "eos_token": eos_ids[0] if eos_ids else None}
    return Vocabulary(
        token_bytes=token_bytes,
        control=control,
        plain=_tokenizer(bpe, rules, user_defined),
        parsing=_tokenizer(bpe, rules, user_defined + _added(control.values(), special=True)),
        vocab_size=len(tokens),
        eos_token_ids=eos_ids,
        bos_token_id=bos_id,
        adds_bos=metadata.get("tokenizer.ggml.add_bos_token", rules.adds_bos) is True,
        longest_token_bytes=max(
            map(len, (*token_bytes.values(), *(text.encode() for text in control.values()))), default=1
        ),
        chat_template=(
            fields.text(metadata, "tokenizer.chat_template")
            if "tokenizer.chat_template" in metadata
            else None
        ),
        named_tokens={name: tokens[index] for name, index in named.items() if index is not None},
    )


def _added(texts: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(text, special=special, normalized=False) for text in texts if text]


def _types(metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != n_tokens:
        found = f"{len(types)} entries" if isinstance(types, list) else "missing"
        raise CheckpointError(f"metadata 'tokenizer.ggml.token_type': {found}, expected {n_tokens}")
    return types


def _bpe(tokens: Sequence[str], merges: Sequence[str], ignores_merges: bool) -> Any:
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(text for index, text in enumerate(tokens) if vocabulary[text] != index)
        raise CheckpointError(f"token {twice!r} occurs twice in the vocabulary")
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"merge {index} is {merge!r}, expected two tokens that make a third")
        pairs.append((left, right))
    return BPE(vocabulary, pairs, ignore_merges=ignores_merges)


def _tokenizer(bpe: Any, rules: _PreTokenizer, added: list[AddedToken]) -> Any:
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(rules.steps))
    tokenizer.add_tokens(added)
    return tokenizer
