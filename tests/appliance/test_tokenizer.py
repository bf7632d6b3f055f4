"""The GGUF tokeniser against the tokenizer.json it was made from and a byte-level BPE written out."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gguf.file import GGUFFile
from appliance.text.gguf_tokenizer import from_metadata
from appliance.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf_q4_0"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regexes of each name as llama.cpp (llama-vocab.cpp) has them; each cuts the pieces of the one before.
REGEXES = {"gpt-2": [GPT2], "smollm": [r"\p{N}", GPT2], "llama-bpe": [LLAMA3]}

TEXTS = [
    "",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "it's we're I'LL they'd YOU'VE 'tis",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n  \n\n\n  mixed \n",
    "1234567890 12 345 6.78e-9 2026-01-31",
    "line\n\n2 then  3\n 4",
    "def f(x):\n    return x**2 + 1  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    '{"key": [1, 2.5, null, true], "é": "\\u00e9"}',
    "SELECT * FROM t WHERE a != 'b' -- comment",
    '<div class="x">&nbsp;</div>',
    "https://example.org/a_b?c=d&e=%20#f",
    "Grüße aus Köln, ça va? ¿Qué tal? Ångström",
    "Привет, как дела? Добрый день!",
    "Γειά σου Κόσμε",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナとひらがな",
    "안녕하세요 세계",
    "שלום עולם",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 ❤️ 👍🏽",
    "½ ² Ⅷ ① ㊿ ٣",
    "e\u0301 (combining) vs é; ﬁ ligature; ｆｕｌｌ",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028separator",
    "!!!???...---___===+++",
    "$€£¥₿ ±×÷≠≤≥∞∑∫√",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseAndsnake_case_and-kebab-case",
    "\x00\x01\x7f control",
]
SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|> <|im_end|>x<|endoftext|>",
    "almost <|im_start> <im_start|> <| im_end |>",
    "<repo_name>a/b<file_sep>c.py\n1<issue_start>2",
]


class BPE:
    """Byte-level BPE as its papers and llama.cpp describe it, slow and plain."""

    def __init__(self, metadata: dict[str, Any], pre: str) -> None:
        self.regexes = [regex.compile(pattern) for pattern in REGEXES[pre]]
        self.ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.whole_first = pre == "llama-bpe"
        kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
        names = sorted((t for t, kind in kinds if kind == 3), key=len, reverse=True)
        self.special = regex.compile("(" + "|".join(map(regex.escape, names)) + ")")
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in printable]
        self.stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        parts = self.special.split(text) if parse_special else [text]
        ids: list[int] = []
        for index, part in enumerate(parts):
            ids += [self.ids[part]] if index % 2 else self.encode_plain(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        pieces = [text]
        for pattern in self.regexes:
            pieces = [cut for piece in pieces for cut in self.cut(pattern, piece)]
        return [i for piece in pieces for i in self.merge("".join(self.stand_in[b] for b in piece.encode()))]

    @staticmethod
    def cut(pattern: Any, piece: str) -> list[str]:
        """The matches, and what lies between them."""
        cuts, at = [], 0
        for match in pattern.finditer(piece):
            cuts += [piece[at : match.start()], match.group()]
            at = match.end()
        return [cut for cut in [*cuts, piece[at:]] if cut]

    def merge(self, word: str) -> list[int]:
        if self.whole_first and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(ranked)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts if part in self.ids]


@pytest.fixture(scope="module")
def mini() -> dict[str, Any]:
    with GGUFFile(GOLDEN / "mini-q4_0.gguf") as file:
        return file.metadata


@pytest.fixture(scope="module")
def starter(starter_model: Path) -> dict[str, Any]:
    with GGUFFile(starter_model) as file:
        return file.metadata


def test_encodes_what_llama_cpp_and_tokenizer_json_encode(mini: dict[str, Any]) -> None:
    probe = json.loads((GOLDEN / "meta.json").read_text())["tokenizer_probe"]
    tokenizer = Tokenizer.load(GOLDEN / "mini-q4_0.gguf")
    assert tokenizer.encode(probe["text"], parse_special=True) == probe["ids"]
    assert tokenizer.decode(probe["ids"]) == probe["text"]
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (128, 1, (2,))
    assert tokenizer.chat_template is None
    assert mini["tokenizer.ggml.pre"] == "gpt-2"


@settings(max_examples=200)
@given(
    words=st.lists(
        st.sampled_from(["<s>", "</s>", " the", "  ", "\n", "'s", "or", "1", "12", "x==y", "tion", "A"])
    )
)
def test_agrees_with_tokenizer_json_on_what_its_vocabulary_can_write(words: list[str]) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    ours = Tokenizer.load(GOLDEN / "mini-q4_0.gguf")
    text = "".join(words)
    assert ours.encode(text, parse_special=True) == theirs.encode(text).ids


@pytest.mark.starter
@pytest.mark.parametrize("pre", sorted(REGEXES))
def test_agrees_with_a_plain_bpe(starter: dict[str, Any], pre: str) -> None:
    metadata = {**starter, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    ours, theirs = Tokenizer(from_metadata(metadata)), BPE(metadata, pre)
    for text in TEXTS + SPECIAL_TEXTS:
        for parse_special in (True, False):
            ids = ours.encode(text, parse_special=parse_special)
            assert ids == theirs.encode(text, parse_special), (text, parse_special)


@pytest.mark.starter
def test_agrees_with_transformers_reading_of_the_file(starter_model: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        starter_model.parent, gguf_file=starter_model.name
    ).backend_tokenizer
    # transformers does not read `tokenizer.ggml.pre`; these are the steps of SmolLM2's own tokenizer.json.
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = Tokenizer.load(starter_model)
    for text in TEXTS[:-1] + SPECIAL_TEXTS:
        ids = ours.encode(text, parse_special=True)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        visible = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == visible


@pytest.mark.starter
def test_the_starters_tokens(starter: dict[str, Any]) -> None:
    tokenizer = Tokenizer(from_metadata(starter))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in tokenizer.encode("<|im_end|>", parse_special=False)
    assert tokenizer.decode(tokenizer.encode("<|im_end|>", parse_special=False)) == "<|im_end|>"
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template
    for text in TEXTS[:-1]:
        ids = tokenizer.encode(text, parse_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@pytest.mark.starter
def test_lone_surrogates_are_replaced_and_pairs_are_joined(starter: dict[str, Any]) -> None:
    tokenizer = Tokenizer(from_metadata(starter))
    ids = tokenizer.encode("\ufeffa\ud83db\ude00c\ud83d\ude00\ud83d", parse_special=True)
    assert tokenizer.decode(ids) == "\ufeffa�b�c😀�"


def changed(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_bos_is_added_where_the_model_or_the_caller_wants_it(mini: dict[str, Any]) -> None:
    plain = Tokenizer(from_metadata(mini)).encode("a", parse_special=True)
    assert 1 not in plain
    assert Tokenizer(from_metadata(mini)).encode("a", parse_special=True, add_bos=True) == [1, *plain]
    wants = Tokenizer(from_metadata(changed(mini, add_bos_token=True)))
    assert wants.encode("a", parse_special=True) == [1, *plain]
    assert wants.encode("a", parse_special=True, add_bos=False) == plain
    # Llama 3's files say nothing, and want it.
    assert Tokenizer(from_metadata(changed(mini, pre="llama-bpe"))).encode("a", parse_special=True)[0] == 1


def test_user_defined_tokens_are_found_always_and_written_as_they_are(mini: dict[str, Any]) -> None:
    tokens, types = [*mini["tokenizer.ggml.tokens"], "ä b"], [*mini["tokenizer.ggml.token_type"], 4]
    tokenizer = Tokenizer(from_metadata(changed(mini, tokens=tokens, token_type=types)))
    for parse_special in (True, False):
        assert tokenizer.encode("aä b", parse_special=parse_special)[-1] == 128
    assert tokenizer.token_bytes(128) == "ä b".encode()


def test_bytes_that_the_vocabulary_lacks_are_left_out(mini: dict[str, Any]) -> None:
    tokenizer = Tokenizer(from_metadata(mini))
    assert tokenizer.encode("a\x07b", parse_special=True) == tokenizer.encode("ab", parse_special=True)


@pytest.mark.parametrize("token_id", [-1, 128, 10**9])
def test_ids_outside_the_vocabulary_are_refused(mini: dict[str, Any], token_id: int) -> None:
    tokenizer = Tokenizer(from_metadata(mini))
    for call in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(IndexError, match="vocabulary has 128 tokens"):
            call(token_id)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedFormatError, "'bert' is not supported; what works: gpt2, llama"),
        (
            {"pre": "command-r"},
            UnsupportedFormatError,
            "'command-r' is not supported; what works: dbrx, deepseek-r1-qwen, gpt-2, gpt-4o, llama-bpe",
        ),
        ({"pre": ["x"]}, UnsupportedFormatError, "is not supported"),
        ({"token_type": [1, 2]}, CheckpointError, "2 entries, expected 128"),
        ({"token_type": None}, CheckpointError, "missing, expected 128"),
        ({"tokens": ["a"] * 128}, CheckpointError, "'a' occurs twice"),
        ({"merges": ["a zzz"]}, CheckpointError, "merge 0 is 'a zzz'"),
        ({"merges": ["ab"]}, CheckpointError, "merge 0 is 'ab'"),
        ({"eos_token_id": 128}, CheckpointError, "is 128, but the vocabulary has 128"),
        ({"bos_token_id": -1}, CheckpointError, "is -1"),
    ],
)
def test_contradictions_are_named(
    mini: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        Tokenizer(from_metadata(changed(mini, **changes)))
    assert message in str(caught.value)


def test_a_damaged_vocabulary_is_refused_or_still_encodes(tmp_path: Path) -> None:
    whole = (GOLDEN / "mini-q4_0.gguf").read_bytes()
    draw, path = random.Random(1), tmp_path / "x.gguf"
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(900, 5000)] = draw.choice((0, 1, 32, 128, 255))
        path.write_bytes(content)
        try:
            tokenizer = Tokenizer.load(path)
        except CheckpointError:
            continue
        assert all(0 <= i < 128 for i in tokenizer.encode("the <s> 12\n", parse_special=True))
