"""Chat templates of model folders against transformers' apply_chat_template on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_chat_template import BUSY, CONVERSATIONS, SMOLLM2, user
from test_tokenizer import TEXTS
from tokenizer_folders import byte_level, llama2, write_folder
from transformers import AutoTokenizer

from appliance.quant.errors import CheckpointError
from appliance.text import hf_template
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer

NAMES = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<unk>",
}


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    return llama2([text for text in TEXTS if text])


def of(folder: Path) -> ChatTemplate:
    return ChatTemplate.of(Tokenizer.load(folder))


@pytest.mark.parametrize("source", [SMOLLM2, BUSY, "{{ pad_token }}{{ messages[0].content }}"])
def test_prompts_and_their_ids_are_transformers(
    tmp_path: Path, definition: dict[str, Any], source: str
) -> None:
    folder = write_folder(tmp_path, definition, tokenizer_config=NAMES | {"chat_template": source})
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    template = ChatTemplate.of(ours)
    for messages in filter(None, CONVERSATIONS):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = template.render(messages)
        assert prompt == expected
        ids = theirs(prompt, add_special_tokens=False)["input_ids"]
        assert ours.encode(prompt, parse_special=True, add_bos=False) == ids


def test_templates_see_the_tokenisers_own_end_of_text(tmp_path: Path) -> None:
    """Not the smallest of all ids that end generation."""
    names = {"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}|{{ bos_token }}"}
    folder = write_folder(
        tmp_path, byte_level(TEXTS), tokenizer_config=names, config={"eos_token_id": [400, 402]}
    )
    assert Tokenizer.load(folder).eos_token_ids == (400, 402)
    assert of(folder).render([]) == "<|im_end|>|"


def test_the_most_particular_file_has_the_template(tmp_path: Path, definition: dict[str, Any]) -> None:
    folder = write_folder(tmp_path, definition, tokenizer_config=NAMES | {"chat_template": "config"})
    assert of(folder).render([]) == "config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert of(folder).render([]) == "json"
    (folder / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert of(folder).render([]) == "jinja é"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.apply_chat_template([user("x")], tokenize=False) == "jinja é"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ([], None),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        ("plain", "plain"),
    ],
)
def test_of_several_templates_it_is_the_default(
    tmp_path: Path, definition: dict[str, Any], value: Any, expected: str | None
) -> None:
    folder = write_folder(tmp_path, definition, tokenizer_config=NAMES | {"chat_template": value})
    assert Tokenizer.load(folder).chat_template == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
        ("chat_template.jinja", b"x" * 101, "has 101 bytes, expected at most 100"),
        ("chat_template.json", b"{", "chat_template.json is not JSON"),
        ("chat_template.json", b'{"chat_template": {"a": 1}}', "chat_template is a dict"),
        ("chat_template.json", b'{"chat_template": ["a"]}', "chat_template is a list"),
        ("chat_template.json", b'{"chat_template": [{"name": "default", "template": 3}]}', "is a int"),
    ],
)
def test_damaged_templates_are_named(
    tmp_path: Path,
    definition: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
    message: str,
) -> None:
    monkeypatch.setattr(hf_template, "MAX_TEMPLATE_BYTES", 100)
    folder = write_folder(tmp_path, definition)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
