"""Tokenisers of model folders that are damaged, contradict themselves, or are of a kind that is not known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_tokenizer import TEXTS
from tokenizer_folders import byte_level, llama2, write_folder

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.text.tokenizer import Tokenizer

CORPUS = [text for text in TEXTS if text] * 2
LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(CORPUS))
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedFormatError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)


def replaced(**parts: Any) -> dict[str, Any]:
    return byte_level(CORPUS) | parts


WORDS = {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "##", "vocab": {"x": 0},
         "max_input_chars_per_word": 9}  # fmt: skip
SUFFIXED = {"type": "BPE", "end_of_word_suffix": "</w>", "vocab": {"a": 0}, "merges": []}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
BOS = {"id": "<s>", "ids": [400, 401], "tokens": ["<|endoftext|>", "<|im_start|>"]}
BEGIN_TWICE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<s>": BOS},
}
BEGIN_NOWHERE = BEGIN_TWICE | {"special_tokens": {"<s>": BOS | {"ids": [407], "tokens": ["?"]}}}
BEGIN_UNKNOWN = BEGIN_TWICE | {"special_tokens": {}}
BERT = {"type": "BertProcessing", "sep": ["a", 64], "cls": ["b", 65]}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": WORDS, "added_tokens": []}, "tokeniser model 'WordPiece' is not supported"),
        ({"model": SUFFIXED, "added_tokens": []}, "a prefix or suffix of their own"),
        ({"decoder": None}, "decoder none is not supported"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder WordPiece"),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "decoder BPEDecoder"),
        ({"decoder": {"type": "Sequence", "decoders": [STRIP, {"type": "Fuse"}]}}, "decoder Strip + Fuse"),
        ({"decoder": {"type": "Fuse"}}, "decoder Fuse"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "▁"}, "content": " "}}, "decoder Replace"),
        ({"post_processor": BERT}, "post-processor 'BertProcessing'"),
        ({"post_processor": BEGIN_TWICE}, "tokens [400, 401] before and [] after"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        Tokenizer.load(write_folder(tmp_path, replaced(**parts)))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


UNIGRAM = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None, "byte_fallback": False}
THINK = {"id": 403, "content": "<think>"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": {}}, "tokenizer.json: model.vocab is missing"),
        ({"tokenizer": []}, "tokenizer.json holds a list"),
        ({"tokenizer": replaced(model={"vocab": {"a": "b"}})}, "model.vocab is missing or malformed"),
        ({"tokenizer": replaced(model={"vocab": [["a"]]})}, "model.vocab is missing or malformed"),
        ({"tokenizer": replaced(normalizer={"type": "Magic"})}, "the tokenizers library refuses it"),
        ({"tokenizer": replaced(post_processor=BEGIN_NOWHERE)}, "post-processor's token 407 is not in"),
        ({"tokenizer": replaced(post_processor=BEGIN_UNKNOWN)}, "post-processor's token '<s>' has no ids"),
        ({"tokenizer": replaced(model=UNIGRAM, added_tokens=[])}, "model.unk_id is None, expected an id"),
        ({"tokenizer": replaced(added_tokens={})}, None),
        ({"tokenizer": replaced(added_tokens={"a": 1})}, "added_tokens is a dict"),
        ({"tokenizer": replaced(added_tokens=[3])}, "added_tokens[0] is 3"),
        ({"tokenizer": replaced(added_tokens=[{"id": -1, "content": "x"}])}, "added_tokens[0] is {'id': -1"),
        ({"tokenizer": replaced(added_tokens=[THINK, THINK])}, "added_tokens[1]: id 403 occurs twice"),
        ({"tokenizer": replaced(added_tokens=[THINK])}, "'<think>' has id 403, but its place makes it 400"),
        ({"tokenizer_config": {"eos_token": "<eos>"}}, "eos_token is '<eos>', but the vocabulary has no"),
        ({"tokenizer_config": {"eos_token": 2}}, "eos_token is 2, expected a token"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, None),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "added_tokens_decoder is a list"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": THINK}}}, "added_tokens_decoder[x] is"),
        ({"tokenizer_config": {"added_tokens_decoder": {"402": THINK}}}, "token 402 is '<|im_end|>' in"),
        ({"tokenizer_config": {"chat_template": 1}}, "chat_template is a int"),
        ({"special_tokens_map": []}, "special_tokens_map.json holds a list"),
        ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id is '2'"),
        ({"config": {"eos_token_id": 409}}, "eos_token_id is 409"),
        ({"config": {"vocab_size": 300}}, "but config.json's vocab_size is 300"),
        ({"config": {"vocab_size": None}}, "config.json: metadata 'vocab_size' is missing"),
        ({"config": {"vocab_size": 10**15}}, None),
    ],
)
def test_contradictions_are_named(tmp_path: Path, files: dict[str, Any], message: str | None) -> None:
    folder = write_folder(tmp_path, byte_level(CORPUS), **files)
    if message is None:
        assert Tokenizer.load(folder).encode("a", parse_special=True) == [64]
        return
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_file_is_refused_or_still_encodes(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, llama2(CORPUS), tokenizer_config=LLAMA_NAMES)
    whole, draw = (folder / name).read_bytes(), random.Random(1)
    for place in range(0, len(whole), -(-len(whole) // 25)):
        (folder / name).write_bytes(whole[:place])
        with pytest.raises(CheckpointError, match=name):
            Tokenizer.load(folder)
    values: list[Any] = [None, True, -1, 2**40, 1e400, "", "\ud800", "<s>", [], {}, [[]], {"content": "<s>"}]
    for _ in range(150):
        content = json.loads(whole)
        change(content, draw, values)
        (folder / name).write_text(json.dumps(content))
        try:
            tokenizer = Tokenizer.load(folder)
        except CheckpointError:
            continue
        for parse_special in (True, False):
            ids = tokenizer.encode("the <s> 12\n", parse_special=parse_special)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
            tokenizer.decode(ids)


def change(content: Any, draw: random.Random, values: list[Any]) -> None:
    """One value of a JSON document, anywhere in it, becomes another or is lost."""
    while True:
        key = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
        inner = content[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            break
        content = inner
    if draw.random() < 0.3:
        del content[key]
    else:
        content[key] = draw.choice(values)
