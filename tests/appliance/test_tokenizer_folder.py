"""The tokeniser of a model folder against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import GOLDEN, SPECIAL_TEXTS, TEXTS
from tokenizer_folders import byte_level, llama2, mistral, unigram, write_folder
from transformers import AutoTokenizer

from appliance.text.stream import TextStream
from appliance.text.tokenizer import Tokenizer

MORE_TEXTS = [
    " one",
    "  two",
    "   ",
    "\n",
    "\n\n x",
    "a\n b",
    "▁",
    "a▁b",
    "<0x0A>",
    "e\u0301",
    "\ufffd",
    "<s>",
    "</s> x",
    "x <unk>",
    "a<s> b</s>c",
    "<|im_end|>\n",
    "<think> a </think>",
    "\U0001f469\u200d\U0001f4bb",
]
HARD = [*TEXTS, *SPECIAL_TEXTS, *MORE_TEXTS]
LLAMA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN_NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
CORPUS = [text for text in TEXTS if text] * 2
KINDS: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]] = {
    "byte_level": (byte_level, QWEN_NAMES),
    "llama2": (llama2, LLAMA_NAMES),
    "mistral": (mistral, LLAMA_NAMES),
    "unigram": (unigram, LLAMA_NAMES),
}


class Pair:
    """Both readings of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours = Tokenizer.load(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder)

    def normal(self, text: str) -> str:
        """What is left of a text where it is encoded and decoded."""
        definition = json.loads((self.folder / "tokenizer.json").read_text())
        if definition["decoder"]["type"] == "ByteLevel":
            return unicodedata.normalize("NFC", text)
        text = text.replace("▁", " ")
        if definition["model"]["type"] == "Unigram":
            # Its pieces for bytes are matched in a text like others.
            text = text.replace("<0x0A>", "\n")
        # Here the space before the text is only put where there is none.
        return text.removeprefix(" ") if definition["pre_tokenizer"] else text


@pytest.fixture(scope="module", params=sorted(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    build, names = KINDS[request.param]
    return Pair(written(tmp_path_factory.mktemp(request.param), build, names))


def written(
    folder: Path, build: Callable[[Any], dict[str, Any]], names: dict[str, Any], **files: Any
) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    return write_folder(folder, build(CORPUS), **{"tokenizer_config": config, **files})


def test_ids_are_transformers(pair: Pair) -> None:
    for text in HARD:
        assert pair.ours.encode(text, parse_special=True) == pair.theirs.encode(text), text
        bare = pair.theirs.encode(text, add_special_tokens=False)
        assert pair.ours.encode(text, parse_special=True, add_bos=False) == bare, text


def test_ids_of_a_golden_folder_are_transformers(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", **LLAMA_NAMES})
    )
    both = Pair(tmp_path)
    probe = json.loads((GOLDEN / "meta.json").read_text())["tokenizer_probe"]
    assert both.ours.encode(probe["text"], parse_special=True) == probe["ids"]
    for text in HARD:
        assert both.ours.encode(text, parse_special=True) == both.theirs.encode(text), text
    assert (both.ours.vocab_size, both.ours.bos_token_id, both.ours.eos_token_ids) == (128, 1, (2,))
    assert not both.ours.adds_bos


def test_text_never_becomes_a_control_token_unless_it_may(pair: Pair) -> None:
    control = set(pair.theirs.all_special_ids)
    assert control
    for token_id in control:
        text = pair.theirs.convert_ids_to_tokens(token_id)
        for around in (text, f" {text} ", f"x{text}y", text * 2):
            assert token_id in pair.ours.encode(around, parse_special=True, add_bos=False)
            plain = pair.ours.encode(around, parse_special=False, add_bos=False)
            assert not control & set(plain), around
            assert pair.ours.decode(plain) == pair.normal(around)


def test_merges_make_no_control_tokens(tmp_path: Path) -> None:
    definition = llama2(CORPUS)
    model = definition["model"]
    for text in ("<", ">", "s>", "▁<s>"):
        model["vocab"].setdefault(text, len(model["vocab"]))
    model["merges"] = [["s", ">"], ["<", "s>"], ["▁", "<s>"], *model["merges"]]
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition, tokenizer_config=LLAMA_NAMES))
    assert 1 in tokenizer.encode("<s>a", parse_special=True, add_bos=False)
    for text in ("<s>", "a<s>b", "<s><s>", "<unk>"):
        ids = tokenizer.encode(text, parse_special=False, add_bos=False)
        assert not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == text


def test_whole_words_are_no_control_tokens(tmp_path: Path) -> None:
    """Where a word that is in the vocabulary is taken as it is, without merging."""
    definition = byte_level(CORPUS)
    definition["model"]["ignore_merges"] = True
    definition["model"]["vocab"]["<|im_end|>"] = 400
    definition["added_tokens"] = [{"id": 400, "content": "<|im_end|>", "special": True}]
    definition["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": False,
    }  # fmt: skip
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition))
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [400]
    ids = tokenizer.encode("<|im_end|>", parse_special=False)
    assert 400 not in ids
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_other_added_tokens_are_found_always(tmp_path: Path) -> None:
    both = Pair(written(tmp_path, byte_level, QWEN_NAMES))
    [think] = both.theirs.encode("<think>")
    for parse_special in (True, False):
        assert both.ours.encode("a<think>b", parse_special=parse_special)[1:-1] == [think]
    assert both.ours.token_bytes(think) == b"<think>"


def test_added_tokens_of_a_byte_level_vocabulary_are_written_as_they_are(tmp_path: Path) -> None:
    """Where transformers takes their letters for bytes, and so loses them."""
    definition = byte_level(CORPUS)
    definition["added_tokens"].append({"id": 404, "content": "<é>", "special": False})
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition))
    ids = tokenizer.encode("a<é>", parse_special=True)
    assert ids[-1] == 404
    assert tokenizer.decode(ids) == "a<é>"


def test_decoding_is_transformers_and_gives_the_text_back(pair: Pair) -> None:
    for text in HARD:
        ids = pair.theirs.encode(text)
        assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True), text
        assert pair.ours.decode(pair.ours.encode(text, parse_special=False)) == pair.normal(text)


def test_a_stream_goes_on_where_the_prompt_ends(pair: Pair) -> None:
    """For every split into prompt and answer, and whatever the pieces that the answer comes in."""
    for text in ("The quick brown  fox", "Grüße 😀 你好\n x", " a", "été ▁"):
        ids = pair.ours.encode(text, parse_special=False)
        whole = b"".join(map(pair.ours.token_bytes, ids))
        for cut in range(len(ids) + 1):
            stream = TextStream(pair.ours)
            pieces = [stream.push([token_id]) for token_id in ids[cut:]] + [stream.finish()]
            before = b"".join(map(pair.ours.token_bytes, ids[:cut]))
            assert "".join(pieces) == whole[len(before) :].decode("utf-8", "replace")
        # Only a space that the tokeniser put before the text itself is missing from it.
        assert whole.decode() in (pair.ours.decode(ids), " " + pair.ours.decode(ids))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_decode_and_stream_to_the_same(pair: Pair, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, pair.ours.vocab_size - 1), max_size=12))
    stream = TextStream(pair.ours)
    streamed = "".join(stream.push([token_id]) for token_id in ids) + stream.finish()
    assert pair.ours.decode(ids) in (streamed, streamed.removeprefix(" "))


def test_invalid_bytes_become_replacement_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path, llama2, LLAMA_NAMES))
    first, *rest = "😀".encode()
    ids = [3 + first, 3 + ord("a"), *(3 + byte for byte in "é".encode())]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([first]), b"a", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "\ufffdaé"
    assert tokenizer.decode([3 + rest[0]]) == "\ufffd"


def test_padding_of_the_vocabulary_stands_for_nothing(pair: Pair) -> None:
    last = pair.ours.vocab_size - 1
    assert pair.ours.vocab_size == len(pair.theirs) + 5
    assert (pair.ours.token_bytes(last), pair.ours.token_text(last), pair.ours.decode([last])) == (
        b"",
        "",
        "",
    )
    with pytest.raises(IndexError, match=f"vocabulary has {last + 1} tokens"):
        pair.ours.token_bytes(last + 1)


def test_control_tokens_are_written_only_where_they_are_named(pair: Pair) -> None:
    for token_id in pair.theirs.all_special_ids:
        assert pair.ours.token_bytes(token_id) == b""
        assert pair.ours.token_text(token_id) == pair.theirs.convert_ids_to_tokens(token_id)


def test_every_token_is_spelled_as_transformers_spells_it(pair: Pair) -> None:
    """After another token, so that no step that looks at the first one plays a part."""
    anchor = pair.theirs.encode("e")[-1]
    before = pair.theirs.decode([anchor])
    for token_id in range(len(pair.theirs)):
        after = pair.theirs.decode([anchor, token_id], skip_special_tokens=True)
        assert after == before + pair.ours.token_bytes(token_id).decode("utf-8", "replace"), token_id


def test_spellings_are_those_of_a_continuation(pair: Pair) -> None:
    for spelled, expected in zip(pair.ours.spellings(["fox"]), ("fox", " fox"), strict=True):
        assert b"".join(map(pair.ours.token_bytes, spelled)).decode() == expected


def test_no_token_stands_for_more_than_it_says(pair: Pair) -> None:
    longest = pair.ours.longest_token_bytes
    assert longest < 200
    for text in HARD:
        for parse_special in (True, False):
            ids = pair.ours.encode(text, parse_special=parse_special, add_bos=False)
            assert len(text.encode()) <= len(ids) * longest


def test_composing_letters_makes_tokens_stand_for_more(tmp_path: Path) -> None:
    definition = byte_level(CORPUS)
    composing = Tokenizer.load(write_folder(tmp_path, definition)).longest_token_bytes
    plain = Tokenizer.load(write_folder(tmp_path, definition | {"normalizer": None})).longest_token_bytes
    stripping = Tokenizer.load(write_folder(tmp_path, definition | {"normalizer": {"type": "StripAccents"}}))
    assert (composing, stripping.longest_token_bytes) == (3 * plain, sys.maxsize)


def test_no_length_is_promised_where_a_token_takes_any_whitespace(tmp_path: Path) -> None:
    definition = llama2(CORPUS)
    definition["added_tokens"][2]["rstrip"] = True
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition))
    assert len(tokenizer.encode("</s>" + " " * 5000, parse_special=True, add_bos=False)) == 1
    assert tokenizer.longest_token_bytes == sys.maxsize


def test_truncation_and_padding_are_not_for_prompts(tmp_path: Path) -> None:
    definition = byte_level(CORPUS)
    ids = Tokenizer.load(write_folder(tmp_path, definition)).encode("a b c d e", parse_special=True)
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    definition["model"]["dropout"] = 0.9
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition))
    assert tokenizer.encode("a b c d e", parse_special=True) == ids
    assert len(ids) > 2


@pytest.mark.parametrize("build", [byte_level, llama2])
@pytest.mark.parametrize("flag", [True, False, None])
def test_bos_is_added_where_the_post_processor_adds_it(tmp_path: Path, build: Any, flag: bool | None) -> None:
    names = {"bos_token": "<s>" if build is llama2 else "<|endoftext|>", "add_bos_token": flag}
    both = Pair(written(tmp_path, build, names))
    assert both.ours.encode("a b", parse_special=True) == both.theirs.encode("a b")
    assert both.ours.adds_bos == (build is llama2)
    assert both.ours.encode("a b", parse_special=True, add_bos=True)[0] == both.theirs.bos_token_id


@pytest.mark.parametrize(("flag", "bos"), [(True, "<s>"), (True, None), (False, "<s>"), (None, "<s>")])
def test_without_a_post_processor_the_configuration_says_whether_bos_is_added(
    tmp_path: Path, flag: bool | None, bos: str | None
) -> None:
    definition = llama2(CORPUS) | {"post_processor": None}
    config = {"bos_token": bos, "add_bos_token": flag}
    tokenizer = Tokenizer.load(write_folder(tmp_path, definition, tokenizer_config=config))
    assert tokenizer.adds_bos == (flag is True and bos is not None)
    assert (tokenizer.encode("a", parse_special=True)[0] == 1) == tokenizer.adds_bos


def test_nothing_ends_a_prompt(tmp_path: Path) -> None:
    definition = llama2(CORPUS)
    template = definition["post_processor"]
    template["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    template["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    both = Pair(write_folder(tmp_path, definition, tokenizer_config=LLAMA_NAMES))
    assert [*both.ours.encode("a", parse_special=True), 2] == both.theirs.encode("a")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 400}}, (400,)),
        ({"config": {"eos_token_id": 402}, "generation_config": {"eos_token_id": [402, 400]}}, (400, 402)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": [401]}}, (401, 402)),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}}, (402,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|im_start|>", "lstrip": False}}}, (401,)),
        ({"special_tokens_map": {"eos_token": "<|im_start|>"}, "tokenizer_config": None}, (401,)),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, ()),
        # Not flagged as special anywhere, but it ends generation.
        ({"config": {"eos_token_id": 403}}, (403,)),
    ],
)
def test_generation_ends_at_what_any_file_names(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(CORPUS), **files))
    assert tokenizer.eos_token_ids == expected
    for token_id in expected:
        assert tokenizer.token_bytes(token_id) == b""
        assert token_id not in tokenizer.encode(tokenizer.token_text(token_id), parse_special=False)


def test_a_token_is_special_if_any_file_says_so(tmp_path: Path) -> None:
    entry = {"content": "<think>", "special": True}
    for config in (
        {"added_tokens_decoder": {"403": entry}},
        {"additional_special_tokens": ["<think>"]},
        {"extra_special_tokens": {"thought": "<think>"}},
    ):
        tokenizer = Tokenizer.load(write_folder(tmp_path, byte_level(CORPUS), tokenizer_config=config))
        assert tokenizer.token_bytes(403) == b""
        assert 403 not in tokenizer.encode("<think>", parse_special=False)


def test_tokens_that_only_the_configuration_adds_are_added(tmp_path: Path) -> None:
    tool = {"content": "<tool>", "special": False, "normalized": False}
    both = Pair(written(tmp_path, byte_level, {**QWEN_NAMES, "added_tokens_decoder": {"404": tool}}))
    assert both.ours.encode("a<tool>", parse_special=True) == both.theirs.encode("a<tool>")
    assert both.ours.encode("a<tool>", parse_special=True)[-1] == 404


def test_tokens_without_a_row_in_the_model_are_no_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(CORPUS), config={"vocab_size": 403})
    tokenizer = Tokenizer.load(folder)
    assert max(tokenizer.encode("<think>", parse_special=True)) < 403
    assert tokenizer.decode(tokenizer.encode("<think>", parse_special=True)) == "<think>"
