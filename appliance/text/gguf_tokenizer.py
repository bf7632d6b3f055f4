"""The tokeniser that a GGUF file carries. No torch.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE) or `llama` (SentencePiece's BPE). Anything else is refused: a
guess would quietly give other ids than the model was trained on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.models import BPE

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.file import GGUFFile
from appliance.text.gguf_pre_tokenizers import pre_tokenizer
from appliance.text.vocabulary import Vocabulary, byte_level_bytes

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Phi-3's tokens take the whitespace after them away, but for these; its files don't say so.
_PHI3_KEEPS_WHITESPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _Model:
    """What differs between the kinds of tokeniser.

    Attributes:
        bpe, normalizer, pre_tokenizer: parts of a `tokenizers.Tokenizer`; the last two may be None.
        spelled: the bytes that a token of this text and type adds to a text.
        adds_bos: whether a text begins with BOS where the metadata is silent.
        shrinks: how many bytes of a text may become one before it is cut.
        prefixes_space: as of `Vocabulary`.
    """

    bpe: Any
    normalizer: Any
    pre_tokenizer: Any
    spelled: Callable[[str, int], bytes]
    adds_bos: bool
    shrinks: int = 1
    prefixes_space: bool = False


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
    kind = fields.text(metadata, "tokenizer.ggml.model")
    if kind not in _MODELS:
        raise UnsupportedFormatError(
            f"tokeniser model {kind!r} is not supported; what works: {', '.join(_MODELS)}"
        )
    tokens = fields.strings(metadata, meta.TOKENS_KEY)
    types = _types(metadata, len(tokens))
    model = _MODELS[kind](metadata, tokens, types)
    bos_id, eos_id = (meta.token_id(metadata, key, len(tokens)) for key in (meta.BOS_KEY, meta.EOS_KEY))
    control = {i: tokens[i] for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    token_bytes = {
        index: model.spelled(text, kind)
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if index not in control
    }
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    user_defined = [token_bytes[i].decode() for i, kind in enumerate(types) if kind == _USER_DEFINED]
    found_always = list(_added(user_defined, strips, special=False))
    spellings = (*token_bytes.values(), *(text.encode() for text in control.values()))
    named = {"bos_token": bos_id, "eos_token": eos_id}
    template = "tokenizer.chat_template"
    return Vocabulary(
        token_bytes=token_bytes,
        control=control,
        plain=_tokenizer(model, found_always),
        parsing=_tokenizer(model, [*found_always, *_added(control.values(), strips, special=True)]),
        vocab_size=len(tokens),
        eos_token_ids=meta.eos_token_ids(metadata),
        bos_token_id=bos_id,
        adds_bos=metadata.get("tokenizer.ggml.add_bos_token", model.adds_bos) is True,
        longest_token_bytes=sys.maxsize if strips else max(map(len, spellings), default=1) * model.shrinks,
        chat_template=fields.text(metadata, template) if template in metadata else None,
        named_tokens={name: tokens[index] for name, index in named.items() if index is not None},
        prefixes_space=model.prefixes_space,
    )


def _types(metadata: Mapping[str, Any], n_tokens: int) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != n_tokens:
        found = f"{len(types)} entries" if isinstance(types, list) else "missing"
        raise CheckpointError(f"metadata 'tokenizer.ggml.token_type': {found}, expected {n_tokens}")
    return types


def _added(texts: Iterable[str], strips: bool, *, special: bool) -> Iterator[AddedToken]:
    for text in filter(None, texts):
        rstrip = strips and text not in _PHI3_KEEPS_WHITESPACE
        yield AddedToken(text, special=special, normalized=False, rstrip=rstrip)


def _tokenizer(model: _Model, added: list[AddedToken]) -> Any:
    tokenizer = tokenizers.Tokenizer(model.bpe)
    if model.normalizer is not None:
        tokenizer.normalizer = model.normalizer
    if model.pre_tokenizer is not None:
        tokenizer.pre_tokenizer = model.pre_tokenizer
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], _types: Sequence[int]) -> _Model:
    rules = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    vocabulary = _ids(tokens)
    pairs = []
    for index, merge in enumerate(fields.strings(metadata, "tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(f"merge {index} is {merge!r}, expected two tokens that make a third")
        pairs.append((left, right))
    return _Model(
        bpe=BPE(vocabulary, pairs, ignore_merges=rules.ignores_merges),
        normalizer=rules.normalizer,
        pre_tokenizer=pre_tokenizers.Sequence(list(rules.steps)),
        spelled=lambda text, kind: text.encode() if kind == _USER_DEFINED else byte_level_bytes(text),
        adds_bos=rules.adds_bos,
        shrinks=rules.shrinks,
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> _Model:
    """Of two neighbours that make a token, those whose token scores best are merged first.

    As in SentencePiece (bpe_model.cc), tokens that are not text (control, unknown, bytes) are never made by merging;
    characters without a token become their bytes.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        found = f"{len(scores)} entries" if isinstance(scores, list) else "missing"
        raise CheckpointError(f"metadata 'tokenizer.ggml.scores': {found}, expected {len(tokens)}")
    # Older files write the spaces of tokens that are found as they are in the text like those of the others.
    written = [
        text.replace(_SPACE, " ") if kind == _USER_DEFINED else text
        for text, kind in zip(tokens, types, strict=True)
    ]
    prefixes_space = fields.flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefixes_space else []
    return _Model(
        bpe=BPE(_ids(written), _merges(written, types, scores), byte_fallback=True),
        normalizer=normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)]),
        pre_tokenizer=None,
        spelled=_piece_bytes,
        adds_bos=True,
        prefixes_space=prefixes_space,
    )


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {text: index for index, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(text for index, text in enumerate(tokens) if vocabulary[text] != index)
        raise CheckpointError(f"token {twice!r} occurs twice in the vocabulary")
    return vocabulary


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third, best score first; of equals the longer left one first."""
    pieces = {
        text: scores[index]
        for index, text in enumerate(tokens)
        if types[index] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    pairs = [
        (-score, -cut, text)
        for text, score in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    return [(text[:-cut], text[-cut:]) for _, cut, text in sorted(pairs)]


def _piece_bytes(text: str, kind: int) -> bytes:
    if kind != _BYTE:
        return text.replace(_SPACE, " ").encode()
    try:
        (byte,) = bytes.fromhex(text.removeprefix("<0x").removesuffix(">"))
    except ValueError:
        raise CheckpointError(f"token {text!r} is of type byte, expected one like '<0x0A>'") from None
    return bytes([byte])
