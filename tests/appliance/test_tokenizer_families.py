"""Tokenisers of the common families, on 2,000 texts: against plain BPE written out, and against llama.cpp's ids."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizer_texts import texts

from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.file import GGUFFile
from appliance.text.gguf_tokenizer import from_metadata
from appliance.text.tokenizer import Tokenizer
from appliance.text.vocabulary import byte_level_bytes

# As the models' tokenizer.json files have them, but for the case of contractions, which is spelled out.
_CASES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
REGEXES = {
    "qwen2": _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,
    "dbrx": _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,
    "tekken": "|".join(_WORD) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,
    "gpt-4o": "|".join(f"{word}{_CASES}?" for word in _WORD)
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _TAIL,
}
TEXTS = texts()
SPACE = "▁"


@pytest.fixture(scope="module")
def starter(starter_model: Path) -> dict[str, Any]:
    with GGUFFile(starter_model) as file:
        return {**file.metadata, "tokenizer.ggml.add_bos_token": False}


def byte_level(starter: dict[str, Any], pre: str) -> Tokenizer:
    return Tokenizer(from_metadata({**starter, "tokenizer.ggml.pre": pre}))


def sentencepiece_metadata(starter: dict[str, Any], prefix: bool) -> dict[str, Any]:
    """A SentencePiece vocabulary: control tokens, bytes, runs of newlines, and the starter's tokens that are text."""
    kinds = zip(starter["tokenizer.ggml.tokens"], starter["tokenizer.ggml.token_type"], strict=True)
    pieces = [byte_level_bytes(text) for text, kind in kinds if kind == 1]
    words = [piece.decode("utf-8", "ignore").replace(" ", SPACE) for piece in pieces]
    # SentencePiece gives every letter of a token a token; llama.cpp ends a token at its first zero byte.
    words = [word for word in dict.fromkeys([*words, *"".join(words)]) if word and "\x00" not in word]
    fixed = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    fixed += ["\n", "\n\n", "\t\t", "<h1>", SPACE * 2]
    tokens = [*fixed, *(word for word in words if word not in fixed)]
    types = [2, 3, 3, 3, 3, *[6] * 256, 4, 4, 4, 4, 4, *[1] * (len(tokens) - len(fixed))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [float(-index) for index in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@pytest.mark.starter
@pytest.mark.parametrize("pre", sorted(REGEXES))
def test_texts_are_cut_as_the_family_cuts_them(starter: dict[str, Any], pre: str) -> None:
    ids = {text: index for index, text in enumerate(starter["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(starter["tokenizer.ggml.merges"])}
    stand_ins = {byte_level_bytes(chr(code)): chr(code) for code in range(0x21, 0x144)}
    pattern = regex.compile(REGEXES[pre])

    @cache
    def merged(word: str) -> list[int]:
        parts = [stand_ins[bytes([byte])] for byte in word.encode()]
        if pre == "tekken" and "".join(parts) in ids:
            return [ids["".join(parts)]]
        while len(parts) > 1:
            rank, at = min((ranks.get(pair, 1 << 30), at) for at, pair in enumerate(pairwise(parts)))
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ids[part] for part in parts if part in ids]

    tokenizer = byte_level(starter, pre)
    for text in TEXTS:
        whole = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        expected = [index for word in pattern.findall(whole) for index in merged(word)]
        assert tokenizer.encode(text, parse_special=False) == expected, text


@pytest.mark.starter
@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "dbrx", "refact"])
def test_byte_level_ids_are_llama_cpps(starter: dict[str, Any], golden: Path, pre: str) -> None:
    expected = json.loads((golden / "tokenizers.json").read_text())[pre]
    tokenizer = byte_level(starter, pre)
    assert digest([tokenizer.encode(text, parse_special=True) for text in TEXTS]) == expected


@pytest.mark.starter
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_llama_cpps(starter: dict[str, Any], golden: Path, prefix: bool) -> None:
    expected = json.loads((golden / "tokenizers.json").read_text())[f"llama, prefix {prefix}".lower()]
    tokenizer = Tokenizer(from_metadata(sentencepiece_metadata(starter, prefix)))
    ids = [tokenizer.encode(text, parse_special=True, add_bos=False) for text in TEXTS]
    assert digest(ids) == expected


@pytest.mark.starter
def test_sentencepiece_merges_the_best_score_first(starter: dict[str, Any]) -> None:
    metadata = sentencepiece_metadata(starter, prefix=True)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {text: index for index, text in enumerate(tokens)}
    scores = {text: -index for text, index in ids.items() if types[index] in (1, 4)}
    always = regex.compile(r"(\n\n|\n|\t\t|<h1>|  )")
    tokenizer = Tokenizer(from_metadata(metadata))
    for text in TEXTS:
        expected: list[int] = []
        for part in filter(None, always.split(text)):
            written = (
                part.replace("  ", SPACE * 2) if always.fullmatch(part) else SPACE + part.replace(" ", SPACE)
            )
            parts = [written] if always.fullmatch(part) else list(written)
            while len(parts) > 1:
                pairs = [(-scores.get(a + b, -(1 << 30)), at) for at, (a, b) in enumerate(pairwise(parts))]
                worst, at = min(pairs)
                if worst == 1 << 30:
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            for piece in parts:
                fallback = [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
                expected += [ids[piece]] if piece in scores else fallback
        assert tokenizer.encode(text, parse_special=False, add_bos=False) == expected, text
        if "<|" not in text and SPACE not in text and not text.startswith(" ") and not always.search(text):
            assert tokenizer.decode(expected) == text


@pytest.mark.starter
def test_sentencepieces_special_tokens(starter: dict[str, Any]) -> None:
    metadata = sentencepiece_metadata(starter, prefix=False)
    tokenizer = Tokenizer(from_metadata(metadata))
    assert tokenizer.eos_token_ids == (2, 4)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.adds_bos
    assert tokenizer.encode("<|end|>", parse_special=True) == [1, 4]
    assert not {1, 2, 4} & set(tokenizer.encode("<s></s><|end|>", parse_special=False, add_bos=False))
    assert tokenizer.token_bytes(5 + 0xC3) == b"\xc3"
    assert tokenizer.decode(tokenizer.encode("日\U0002ffff", parse_special=False)) == "日\U0002ffff"
    # Phi-3's own tokeniser takes the whitespace after its tokens away.
    phi3 = Tokenizer(from_metadata({**metadata, "general.architecture": "phi3"}))
    assert phi3.encode("<|user|>\n <|end|>\n", parse_special=True, add_bos=False) == [3, 4]
    assert phi3.encode("<s>\n", parse_special=True, add_bos=False) == [1, 261]


@pytest.mark.starter
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "'tokenizer.ggml.scores': 1 entries, expected"),
        ({"scores": None}, "'tokenizer.ggml.scores': missing, expected"),
        ({"token_type": [6] * 5}, "5 entries, expected"),
    ],
)
def test_sentencepieces_contradictions_are_named(
    starter: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    metadata = sentencepiece_metadata(starter, prefix=True)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        from_metadata(metadata)
