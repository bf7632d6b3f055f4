"""The tokeniser of a model folder as transformers saves it, from its tokenizer.json. No torch, no transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.hf import model_config
from appliance.quant.hf.json_file import read_json
from appliance.quant.hf.tokenizer_files import TokenizerFiles
from appliance.text.hf_decoder import read_decoder
from appliance.text.hf_parts import steps
from appliance.text.hf_template import read_template
from appliance.text.hf_tokens import Tokens, read_tokens, spelled_by_model, without
from appliance.text.vocabulary import Vocabulary

# Pre-tokenisers that keep all of a text, unless told to remove what they find.
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


def read_folder(folder: Path) -> Vocabulary:
    """The tokeniser of a model folder.

    Raises:
        CheckpointError: a file is missing or damaged, or they contradict each other.
        UnsupportedFormatError: a kind of tokeniser that is not known.
        OSError: a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedFormatError(
            f"{folder} has no tokenizer.json, the only kind of tokeniser that is read from a folder; make one with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    model = read_json(folder / "config.json")
    with located(folder / "config.json"):
        vocab_size = fields.positive(model, "vocab_size")
    files = TokenizerFiles.read(folder)
    template = read_template(folder, files.config)
    with located(folder):
        eos_ids = model_config.eos_token_ids(folder, model, files)
        tokens = read_tokens(files, eos_ids, vocab_size)
        definition = _checked(files.definition, tokens)
        return _vocabulary(definition, tokens, files.config, vocab_size, eos_ids, template)


def _checked(definition: Mapping[str, Any], tokens: Tokens) -> dict[str, Any]:
    """The definition with all added tokens, and without what shortens, lengthens or varies a text's ids.

    Raises:
        CheckpointError: it could not encode every text.
        UnsupportedFormatError: a kind of model that is not known.
    """
    model = definition["model"]
    kind = model.get("type", "BPE")  # Old files leave it out.
    if kind not in ("BPE", "Unigram"):
        raise UnsupportedFormatError(f"tokeniser model {kind!r} is not supported; what works: BPE, Unigram")
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise UnsupportedFormatError(
            "tokenizer.json: tokens with a prefix or suffix of their own are not supported"
        )
    if isinstance(model["vocab"], list) and type(model.get("unk_id")) is not int:
        raise CheckpointError(f"tokenizer.json: model.unk_id is {model.get('unk_id')!r:.80}, expected an id")
    return {
        **definition,
        "model": {**model, "type": kind, "dropout": None},
        "added_tokens": list(tokens.added.values()),
        "truncation": None,
        "padding": None,
    }


def _vocabulary(
    definition: dict[str, Any],
    tokens: Tokens,
    config: Mapping[str, Any],
    vocab_size: int,
    eos_ids: tuple[int, ...],
    template: str | None,
) -> Vocabulary:
    parsing = _built(definition)
    texts = _texts(parsing, tokens, vocab_size)
    ids = {text: index for index, text in texts.items()}
    bos_id, adds_bos = _beginning(parsing, _bos_id(ids, tokens), eos_ids)
    if bos_id is not None and bos_id not in texts:
        raise CheckpointError(f"tokenizer.json: the post-processor's token {bos_id} is not in the vocabulary")
    if parsing.post_processor is None:
        # Else that decides, as in transformers, which overlooks the flag.
        with located("tokenizer_config.json"):
            adds_bos = fields.flag(config, "add_bos_token", False)
    decoder = read_decoder(steps(parsing.decoder))
    control = {index: text for index, text in texts.items() if text in tokens.special}
    token_bytes = {
        index: decoder.token_bytes(text, index in tokens.added)
        for index, text in texts.items()
        if index not in control
    }
    keeps_bytes = decoder.byte_level or definition["model"].get("byte_fallback") is True
    longest = max(map(len, (*token_bytes.values(), *(text.encode() for text in control.values()))), default=1)
    return Vocabulary(
        token_bytes=token_bytes,
        control=control,
        plain=_plain(definition, tokens, parsing),
        parsing=parsing,
        vocab_size=vocab_size,
        eos_token_ids=eos_ids,
        bos_token_id=bos_id,
        adds_bos=adds_bos,
        longest_token_bytes=min(longest * _most_bytes_per_byte(parsing, tokens, keeps_bytes), sys.maxsize),
        chat_template=template,
        named_tokens=tokens.named,
        prefixes_space=decoder.drops_space,
    )


def _built(definition: Mapping[str, Any]) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    # The library raises nothing more precise.
    except Exception as error:
        raise CheckpointError(
            f"tokenizer.json: the tokenizers library refuses it ({error}); fetch the file again"
        ) from None


def _plain(definition: Mapping[str, Any], tokens: Tokens, parsing: Any) -> Any:
    """The tokeniser that takes special tokens for text."""
    hidden = spelled_by_model(definition, tokens.special)
    if hidden:
        plain = _built(without(definition, hidden))
    else:
        # Shares the model with the other, which is most of the memory and of the time.
        plain = tokenizers.Tokenizer(parsing.model)
        plain.normalizer, plain.pre_tokenizer = parsing.normalizer, parsing.pre_tokenizer
        plain.add_tokens([token for _, token in sorted(parsing.get_added_tokens_decoder().items())])
    plain.encode_special_tokens = True
    return plain


def _texts(tokenizer: Any, tokens: Tokens, vocab_size: int) -> dict[int, str]:
    """Every token's text, by id."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    texts = {index: text for text, index in ids.items()}
    if len(texts) < len(ids):
        twice = next(text for text, index in ids.items() if texts[index] != text)
        raise CheckpointError(f"tokens {texts[ids[twice]]!r} and {twice!r} have the same id, {ids[twice]}")
    if texts and max(texts) >= vocab_size:
        raise CheckpointError(
            f"token {texts[max(texts)]!r} has id {max(texts)}, but config.json's vocab_size is {vocab_size}"
        )
    for index, entry in tokens.added.items():
        if texts.get(index) != entry["content"]:
            raise CheckpointError(
                f"added token {entry['content']!r} has id {index}, but its place makes it "
                f"{ids.get(entry['content'])}; tokens between them are missing"
            )
    return texts


def _bos_id(ids: Mapping[str, int], tokens: Tokens) -> int | None:
    text = tokens.named.get("bos_token")
    index = None if text is None else ids.get(text)
    if text is not None and index is None:
        raise CheckpointError(f"bos_token is {text!r}, but the vocabulary has no such token")
    return index


def _beginning(tokenizer: Any, bos_id: int | None, eos_ids: tuple[int, ...]) -> tuple[int | None, bool]:
    """The token that begins a text, and whether the post-processor puts it there.

    An end that it puts after a text is left out: a prompt is to be continued.
    """
    before: list[int] = []
    after: list[int] = []
    for step in steps(tokenizer.post_processor):
        if step["type"] == "ByteLevel":
            continue
        if step["type"] != "TemplateProcessing":
            raise UnsupportedFormatError(
                f"post-processor {step['type']!r} is not supported; what works: TemplateProcessing, ByteLevel"
            )
        side = before
        for piece in step["single"]:
            if "Sequence" in piece:
                side = after
            else:
                name = piece["SpecialToken"]["id"]
                if name not in step["special_tokens"]:
                    raise CheckpointError(f"tokenizer.json: the post-processor's token {name!r} has no ids")
                side += step["special_tokens"][name]["ids"]
    if len(before) > 1 or not set(after) <= set(eos_ids) or (before and bos_id not in (None, *before)):
        raise UnsupportedFormatError(
            f"the post-processor puts tokens {before} before and {after} after a text; "
            f"what works: the BOS token ({bos_id}) before, an EOS token {list(eos_ids)} after"
        )
    return (before[0] if before else bos_id), bool(before)


def _most_bytes_per_byte(tokenizer: Any, tokens: Tokens, keeps_bytes: bool) -> int:
    """How much longer than what a token stands for the text may be that it is made of."""
    takes_whitespace = any(entry["lstrip"] or entry["rstrip"] for entry in tokens.added.values())
    keeps_all = all(
        step["type"] in _KEEPING and step.get("behavior") != "Removed"
        for step in steps(tokenizer.pre_tokenizer)
    )
    if takes_whitespace or not keeps_bytes or not keeps_all:
        return sys.maxsize
    factor = 1
    for step in steps(tokenizer.normalizer):
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(written)} if len(
                found.encode()
            ) <= len(written.encode()):
                pass
            case {"type": "NFC"}:
                # Three Hangul letters become one syllable, each of three bytes; nothing shrinks more.
                factor *= 3
            case _:
                return sys.maxsize
    return factor
