"""How byte-level BPE cuts a text before merging: what each `tokenizer.ggml.pre` means. No torch.

The regexes are those of the models' own tokenizer.json files; llama.cpp has some of them in a simpler spelling.
What goes with each (BOS, merges) is llama.cpp's (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from appliance.quant.errors import UnsupportedFormatError

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words end where a capital letter follows small ones.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3_REGEX = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2_REGEX = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TEKKEN_REGEX = rf"{_CAPITALISED}|{_CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O_REGEX = (
    rf"{_CAPITALISED}{_CONTRACTION}?|{_CAPITALS}{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging, and what goes with it where the metadata is silent.

    Attributes:
        steps: each cuts the pieces of the one before.
        adds_bos: whether a text begins with the BOS token.
        ignores_merges: whether a piece that is a token becomes that token without merging.
        normalizer: what is done to a text before it is cut, None for nothing.
        shrinks: how many bytes of a text may become one by that.
    """

    steps: Sequence[Any]
    adds_bos: bool = False
    ignores_merges: bool = False
    normalizer: Any = None
    shrinks: int = 1


def _cut_by(regex: str) -> tuple[Any, ...]:
    return (
        pre_tokenizers.Split(Regex(regex), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


_GPT2 = PreTokenizer((pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),))
_DIGITS = PreTokenizer((pre_tokenizers.Digits(individual_digits=True), *_GPT2.steps))
_LLAMA3 = PreTokenizer(_cut_by(_LLAMA3_REGEX), adds_bos=True, ignores_merges=True)
_CL100K = PreTokenizer(_cut_by(_LLAMA3_REGEX))
# In NFC three Hangul letters become one syllable, each of three bytes; nothing shrinks more.
_QWEN2 = PreTokenizer(_cut_by(_QWEN2_REGEX), normalizer=normalizers.NFC(), shrinks=3)
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(_cut_by(_TEKKEN_REGEX), adds_bos=True, ignores_merges=True),
    "gpt-4o": PreTokenizer(_cut_by(_GPT4O_REGEX)),
}


def pre_tokenizer(name: Any) -> PreTokenizer:
    """What `tokenizer.ggml.pre` = `name` means.

    Raises:
        UnsupportedFormatError: it is not known; a guess would quietly give other ids than the model was trained on.
    """
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedFormatError(f"pre-tokeniser {name!r} is not supported; what works: {known}")
    return _PRE_TOKENIZERS[name]
