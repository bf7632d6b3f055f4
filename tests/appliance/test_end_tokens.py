"""Generation ends at what any file of a model folder names, the tokeniser's own end of text too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from appliance import LLM, SamplingParams
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.errors import CheckpointError
from appliance.text.tokenizer import Tokenizer

PROMPT = [5, 12, 19, 26]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def folder(tmp_path: Path, golden: Path) -> Path:
    """A model with a tokeniser, of which neither says what ends generation."""
    folder = tmp_path / "mini"
    shutil.copytree(golden / "gptqmodel_w4_g64_asym", folder)
    shutil.copy(golden / "gguf_q4_0" / "tokenizer.json", folder)
    config = json.loads((folder / "config.json").read_bytes())
    write(folder, "config", {**config, "eos_token_id": None})
    write(folder, "generation_config", {})
    return folder


def write(folder: Path, stem: str, content: Any) -> None:
    (folder / f"{stem}.json").write_text(json.dumps(content))


def generated(folder: Path) -> tuple[tuple[int, ...], str | None]:
    with LLM(str(folder), kv_cache_memory_bytes=2**20) as llm:
        (output,) = llm.generate([PROMPT], SAMPLING)
    (completion,) = output.outputs
    return completion.token_ids, completion.finish_reason


@pytest.mark.parametrize("place", ["tokenizer_config", "special_tokens_map", "added_tokens_decoder"])
def test_the_engine_ends_where_only_the_tokeniser_says_so(folder: Path, place: str) -> None:
    whole, reason = generated(folder)
    assert (len(whole), reason) == (8, "length")
    end = whole[3]
    assert end not in whole[:3]
    definition = json.loads((folder / "tokenizer.json").read_bytes())
    text = next(text for text, index in definition["model"]["vocab"].items() if index == end)
    named = {"eos_token": {"content": text, "special": True}}
    if place == "added_tokens_decoder":
        named = {"eos_token": text, "added_tokens_decoder": {str(end): {"content": text, "special": True}}}
    write(folder, "special_tokens_map" if place == "special_tokens_map" else "tokenizer_config", named)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.eos_token_ids == Tokenizer.load(folder).eos_token_ids == (end,)
    assert generated(folder) == (whole[:3], "stop")


def test_all_files_count(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    write(folder, "config", {**config, "eos_token_id": 9})
    write(folder, "generation_config", {"eos_token_id": [7, 9]})
    write(folder, "tokenizer_config", {"eos_token": "</s>"})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.eos_token_ids == Tokenizer.load(folder).eos_token_ids == (2, 7, 9)


def test_an_end_that_is_no_token_is_named(folder: Path) -> None:
    write(folder, "tokenizer_config", {"eos_token": "<|im_end|>"})
    for read in (open_checkpoint, Tokenizer.load):
        with pytest.raises(
            CheckpointError, match=r"eos_token is '<\|im_end\|>', but the vocabulary has no such"
        ):
            read(folder)


def test_a_folder_without_a_tokeniser_has_what_the_configurations_say(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    write(folder, "tokenizer_config", {"eos_token": "</s>"})
    write(folder, "generation_config", {"eos_token_id": [7]})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.eos_token_ids == (7,)
