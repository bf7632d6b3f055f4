"""Text to token ids and back, built from the tokeniser that a GGUF file carries. No torch.

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
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.file import GGUFFile

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


def _byte_characters() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable Latin-1 stands for itself, the rest follows from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in itself]
    stand_ins = {chr(byte): byte for byte in itself}
    return stand_ins | {chr(256 + index): byte for index, byte in enumerate(shifted)}


_BYTES = _byte_characters()


class Tokenizer:
    """The tokeniser of one model. Safe to use from several threads.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive.
        eos_token_ids: every token that ends generation, sorted.
        bos_token_id: the token that begins a text, None where the model has none.
        adds_bos: whether `encode` puts it there unless told otherwise.
        longest_token_bytes: no token stands for more of a text than this.
        chat_template: source of the model's template, None where the file has none.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """See `from_gguf`."""
        model, pre = fields.text(metadata, "tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if model != "gpt2":
            raise UnsupportedFormatError(f"tokeniser model {model!r} is not supported; what works: gpt2")
        if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            raise UnsupportedFormatError(f"pre-tokeniser {pre!r} is not supported; what works: {known}")
        rules = _PRE_TOKENIZERS[pre]
        self._tokens = fields.strings(metadata, meta.TOKENS_KEY)
        self._types = _types(metadata, len(self._tokens))
        self.vocab_size = len(self._tokens)
        self.eos_token_ids = meta.eos_token_ids(metadata)
        self.bos_token_id = meta.token_id(metadata, "tokenizer.ggml.bos_token_id", self.vocab_size)
        adds_bos = metadata.get("tokenizer.ggml.add_bos_token", rules.adds_bos)
        self.adds_bos = adds_bos is True and self.bos_token_id is not None
        self.chat_template = (
            fields.text(metadata, "tokenizer.chat_template")
            if "tokenizer.chat_template" in metadata
            else None
        )
        # A character of an ordinary token stands for one byte.
        self.longest_token_bytes = max(
            len(text.encode() if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) else text)
            for text, kind in zip(self._tokens, self._types, strict=True)
        )
        bpe = _bpe(self._tokens, fields.strings(metadata, "tokenizer.ggml.merges"), rules.ignores_merges)
        user_defined = self._added(_USER_DEFINED, special=False)
        special = self._added(_CONTROL, special=True) + self._added(_UNKNOWN, special=True)
        self._plain = _tokenizer(bpe, rules, user_defined)
        self._parsing = _tokenizer(bpe, rules, user_defined + special)

    @classmethod
    def from_gguf(cls, source: str | Path | Mapping[str, Any]) -> Tokenizer:
        """From a GGUF file, or from the metadata of one that is already open.

        Raises:
            CheckpointError: the vocabulary is missing or contradicts itself.
            UnsupportedFormatError: a tokeniser model or pre-tokeniser that is not known.
        """
        if isinstance(source, Mapping):
            return cls(source)
        with GGUFFile(source) as file:
            try:
                return cls(file.metadata)
            except CheckpointError as error:
                raise type(error)(f"{source}: {error}") from None

    def encode(self, text: str, *, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        """The ids of a text.

        Bytes that the vocabulary lacks are left out, as llama.cpp does; lone surrogates become U+FFFD.

        Args:
            parse_special: whether the text of a control token, such as `<|im_end|>`, becomes that token.
            add_bos: whether to begin with the BOS token; None asks the model. A rendered chat template has
                written its own, so pass False with it.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
        (encoded,) = (self._parsing if parse_special else self._plain).encode_batch_fast([text])
        ids: list[int] = encoded.ids
        wanted = self.adds_bos if add_bos is None else add_bos
        return [self.bos_token_id, *ids] if wanted and self.bos_token_id is not None else ids

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word as it is written at the start of a text and after a space."""
        found = dict.fromkeys(
            tuple(self.encode(text, parse_special=False, add_bos=False))
            for word in words
            for text in (word, f" {word}")
        )
        return tuple(ids for ids in found if ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: UTF-8, perhaps part of a character; nothing for control tokens.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id}, but the vocabulary has {self.vocab_size} tokens")
        kind, text = self._types[token_id], self._tokens[token_id]
        if kind in (_CONTROL, _UNKNOWN):
            return b""
        if kind == _USER_DEFINED:
            return text.encode("utf-8")
        try:
            return bytes([_BYTES[character] for character in text])
        except KeyError:
            # Padding entries and the like are written as they are.
            return text.encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """How a token is written in a prompt, control tokens included: what a chat template puts for it.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        if 0 <= token_id < self.vocab_size and self._types[token_id] in (_CONTROL, _UNKNOWN):
            return self._tokens[token_id]
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _added(self, kind: int, *, special: bool) -> list[AddedToken]:
        return [
            AddedToken(text, special=special, normalized=False)
            for text, its_kind in zip(self._tokens, self._types, strict=True)
            if its_kind == kind and text
        ]


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
