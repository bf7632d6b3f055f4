"""What the files of a folder's tokeniser say of its tokens, each by itself. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.json_file import read_json

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokeniser, empty where a folder lacks one.

    Attributes:
        definition: tokenizer.json.
        config: tokenizer_config.json.
        special_map: special_tokens_map.json.
    """

    definition: Mapping[str, Any]
    config: Mapping[str, Any]
    special_map: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Raises CheckpointError where a file is damaged, OSError where it cannot be read."""
        names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
        paths = [folder / name for name in names]
        return cls(*(read_json(path) if path.is_file() else {} for path in paths))

    def named(self, name: str) -> str | None:
        """The text of the token that is known by a name, such as `eos_token`.

        Raises:
            CheckpointError: something else than a token is.
        """
        return token_text(self.config.get(name), name) or token_text(self.special_map.get(name), name)

    def added(self) -> dict[int, dict[str, Any]]:
        """Tokens beside the vocabulary proper: entries as in tokenizer.json's `added_tokens`, by id.

        Raises:
            CheckpointError: an entry is mistyped, or two files give one id to different tokens.
        """
        added = _of_definition(self.definition)
        for key, entry in _of_config(self.config):
            index = int(key) if key.isdecimal() and len(key) < 10 else -1
            before = added.setdefault(
                index, added_token(index, entry, f"tokenizer_config.json: added_tokens_decoder[{key}]")
            )
            if before["content"] != entry["content"]:
                raise CheckpointError(
                    f"token {index} is {before['content']!r} in tokenizer.json, "
                    f"but {entry['content']!r} in tokenizer_config.json; fetch the model again"
                )
            if entry.get("special") is True:
                before["special"] = True
        return added

    def ids(self) -> dict[str, int]:
        """The id of each token, by its text.

        Raises:
            CheckpointError: as `added` and `vocabulary`.
        """
        return {entry["content"]: index for index, entry in self.added().items()} | vocabulary(
            self.definition
        )


def vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens of a tokenizer.json's model, by their texts.

    Raises:
        CheckpointError: it has none.
    """
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


def added_token(index: Any, entry: Any, where: str) -> dict[str, Any]:
    """An entry of `added_tokens` with all its flags, from what a file says; raises CheckpointError."""
    content = entry.get("content") if isinstance(entry, dict) else None
    if type(index) is not int or index < 0 or not isinstance(content, str) or not content:
        raise CheckpointError(f"{where} is {entry!r:.80}, expected an id and a content")
    return {"id": index, "content": content, **{flag: entry.get(flag, False) is True for flag in _FLAGS}}


def token_text(value: Any, name: str) -> str | None:
    """The text of a token that is written as a string or as an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"{name} is {value!r:.80}, expected a token")
    return text


def _of_definition(definition: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    listed = definition.get("added_tokens") or []
    if not isinstance(listed, list):
        raise CheckpointError(f"tokenizer.json: added_tokens is a {type(listed).__name__}, expected an array")
    tokens = {}
    for place, entry in enumerate(listed):
        where = f"tokenizer.json: added_tokens[{place}]"
        index = entry.get("id") if isinstance(entry, dict) else None
        token = added_token(index, entry, where)
        if token["id"] in tokens:
            raise CheckpointError(f"{where}: id {index} occurs twice")
        tokens[token["id"]] = token
    return tokens


def _of_config(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    value = config.get("added_tokens_decoder") or {}
    if not isinstance(value, dict):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder is a {type(value).__name__}, expected an object"
        )
    return value.items()
