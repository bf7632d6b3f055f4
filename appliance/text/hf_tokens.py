"""Added and named tokens of a model folder, from all the files that speak of them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.quant.hf.tokenizer_files import TokenizerFiles, added_token, token_text, vocabulary

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FURTHER_SPECIAL = ("additional_special_tokens", "extra_special_tokens")


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


def read_tokens(files: TokenizerFiles, eos_ids: Iterable[int], vocab_size: int) -> Tokens:
    """Added tokens of all the files of a tokeniser.

    A token is special if any of them says so, as in transformers, or if it ends generation. Those for which the
    model has no row are left out, so that no text leads to an id that the model lacks.

    Raises:
        CheckpointError: an entry that is mistyped, or two files that give one id to different tokens.
    """
    added, ids = files.added(), files.ids()
    named = {name: text for name in _NAMES if (text := files.named(name))}
    further = [text for source in (files.config, files.special_map) for text in _further(source)]
    special = {entry["content"] for entry in added.values() if entry["special"]}
    special |= {text for text in (*named.values(), *further) if text in ids}
    special |= {added[index]["content"] for index in eos_ids if index in added}
    for text in special:
        added.setdefault(ids[text], added_token(ids[text], {"content": text}, text))["special"] = True
    return Tokens(
        {index: added[index] for index in sorted(added) if index < vocab_size}, frozenset(special), named
    )


def spelled_by_model(definition: Mapping[str, Any], special: frozenset[str]) -> frozenset[str]:
    """The special tokens that the model itself may make of a text, though `encode_special_tokens` is set.

    They are in its vocabulary, and it takes any piece (Unigram), any whole word (`ignore_merges`), or pairs.
    """
    model = definition["model"]
    known = special & vocabulary(definition).keys()
    if isinstance(model["vocab"], list) or model.get("ignore_merges"):
        return known
    single = {text for text in known if len(text) == 1}
    return frozenset(single | (known & {_parts(merge)[2] for merge in model["merges"]})) if known else known


def without(definition: Mapping[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    """A tokeniser with the same ids whose model makes none of some tokens.

    They get names that no text leads to, since a space becomes another character before the model sees it.
    """
    model = dict(definition["model"])
    ids = vocabulary(definition)
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


def _further(source: Mapping[str, Any]) -> list[str]:
    texts: list[str | None] = []
    for key in _FURTHER_SPECIAL:
        value = source.get(key) or []
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        texts += [token_text(item, key) for item in items]
    return [text for text in texts if text]
