"""Added and named tokens of a model folder, from all the files that speak of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.quant.errors import CheckpointError

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FURTHER_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens beside the vocabulary proper.

    Attributes:
        added: entries as in tokenizer.json's `added_tokens`, by id.
        special: the texts of those that are no text: they control.
        named: by the name that chat templates know them by, such as `eos_token`.
    """

    added: Mapping[int, Mapping[str, Any]]
    special: frozenset[str]
    named: Mapping[str, str]


def read_tokens(
    definition: Mapping[str, Any],
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    eos_ids: Iterable[int],
    vocab_size: int,
) -> Tokens:
    """Added tokens of tokenizer.json (`definition`), tokenizer_config.json and special_tokens_map.json.

    A token is special if any of them says so, as in transformers, or if it ends generation. Those for which the
    model has no row are left out, so that no text leads to an id that the model lacks.

    Raises:
        CheckpointError: an entry that is mistyped, or two files that give one id to different tokens.
    """
    added = _of_tokenizer(definition)
    for key, entry in _entries(config.get("added_tokens_decoder") or {}):
        index = int(key) if key.isdecimal() and len(key) < 10 else -1
        before = added.setdefault(
            index, _entry(index, entry, f"tokenizer_config.json: added_tokens_decoder[{key}]")
        )
        if before["content"] != entry["content"]:
            raise CheckpointError(
                f"token {index} is {before['content']!r} in tokenizer.json, "
                f"but {entry['content']!r} in tokenizer_config.json; fetch the model again"
            )
        if entry.get("special") is True:
            before["special"] = True
    named = {
        name: text
        for name in _NAMES
        for text in [_text(config.get(name), name) or _text(special_map.get(name), name)]
        if text
    }
    further = [text for source in (config, special_map) for text in _further(source)]
    ids = {entry["content"]: index for index, entry in added.items()} | _vocabulary(definition)
    special = {entry["content"] for entry in added.values() if entry["special"]}
    special |= {text for text in (*named.values(), *further) if text in ids}
    special |= {added[index]["content"] for index in eos_ids if index in added}
    for text in special:
        added.setdefault(ids[text], _entry(ids[text], {"content": text}, text))["special"] = True
    return Tokens(
        {index: added[index] for index in sorted(added) if index < vocab_size}, frozenset(special), named
    )


def spelled_by_model(definition: Mapping[str, Any], special: frozenset[str]) -> frozenset[str]:
    """The special tokens that the model itself may make of a text, though `encode_special_tokens` is set.

    They are in its vocabulary, and it takes any piece (Unigram), any whole word (`ignore_merges`), or pairs.
    """
    model = definition["model"]
    known = special & _vocabulary(definition).keys()
    if isinstance(model["vocab"], list) or model.get("ignore_merges"):
        return known
    single = {text for text in known if len(text) == 1}
    return frozenset(single | (known & {_parts(merge)[2] for merge in model["merges"]})) if known else known


def without(definition: Mapping[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    """A tokeniser with the same ids whose model makes none of some tokens.

    They get names that no text leads to, since a space becomes another character before the model sees it.
    """
    model = dict(definition["model"])
    ids = _vocabulary(definition)
    renamed = {text: f" {ids[text]}" for text in hidden}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed.get(text, text): index for text, index in ids.items()}
        model["merges"] = [merge for merge in model["merges"] if renamed.keys().isdisjoint(_parts(merge))]
    else:
        model["vocab"] = [[renamed.get(text, text), score] for text, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    added = [
        {**token, "content": renamed.get(token["content"], token["content"])}
        for token in definition["added_tokens"]
    ]
    return {**definition, "model": model, "added_tokens": added}


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    model = definition.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict) and all(type(index) is int for index in vocab.values()):
        return vocab
    if isinstance(vocab, list) and all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in vocab
    ):
        return {item[0]: index for index, item in enumerate(vocab)}
    raise CheckpointError(
        "tokenizer.json: model.vocab is missing or malformed, expected tokens and their ids or scores"
    )


def _of_tokenizer(definition: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    listed = definition.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CheckpointError(f"tokenizer.json: added_tokens is a {type(listed).__name__}, expected an array")
    tokens = {}
    for place, entry in enumerate(listed):
        where = f"tokenizer.json: added_tokens[{place}]"
        index = entry.get("id") if isinstance(entry, dict) else None
        token = _entry(index, entry, where)
        if token["id"] in tokens:
            raise CheckpointError(f"{where}: id {index} occurs twice")
        tokens[token["id"]] = token
    return tokens


def _entry(index: Any, entry: Any, where: str) -> dict[str, Any]:
    content = entry.get("content") if isinstance(entry, dict) else None
    if type(index) is not int or index < 0 or not isinstance(content, str) or not content:
        raise CheckpointError(f"{where} is {entry!r:.80}, expected an id and a content")
    flags = {flag: entry.get(flag, False) is True for flag in (*_FLAGS, "special")}
    return {"id": index, "content": content, **flags}


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder is a {type(value).__name__}, expected an object"
        )
    return value.items()


def _further(source: Mapping[str, Any]) -> list[str]:
    texts: list[str | None] = []
    for key in _FURTHER_SPECIAL:
        value = source.get(key) or []
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        texts += [_text(item, key) for item in items]
    return [text for text in texts if text]


def _text(value: Any, name: str) -> str | None:
    """The text of a token that is written as a string or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{name} is {value!r:.80}, expected a token")
    return text
