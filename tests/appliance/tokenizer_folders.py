"""Model folders with small tokenisers of the kinds that language models come with, made by the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(corpus: Iterable[str]) -> dict[str, Any]:
    """As Qwen's: NFC, byte-level BPE; control tokens and others behind the vocabulary."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return json.loads(tokenizer.to_str())


def llama2(corpus: Iterable[str]) -> dict[str, Any]:
    """As Llama 2's: `▁` for spaces, one put before every text, bytes for characters that the vocabulary lacks."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _train(tokenizer, corpus)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _without_added_bytes(tokenizer)


def mistral(corpus: Iterable[str]) -> dict[str, Any]:
    """As Mistral's: the same, but a space only before the first words, and put there by the pre-tokeniser."""
    definition = llama2(corpus)
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return json.loads(tokenizer.to_str())


def unigram(corpus: Iterable[str]) -> dict[str, Any]:
    """SentencePiece's other model, whose vocabulary holds the control tokens with a score that always wins."""
    words = sorted({piece for text in corpus for word in text.split() for piece in ("▁" + word, word)})
    letters = sorted({letter for word in words for letter in word} - {"▁"})
    scored = [*((text, 0.0) for text in SPECIAL), *((text, -12.0) for text in BYTES), ("▁", -4.0)]
    scored += [(word, -8.0) for word in words if len(word) > 1] + [(letter, -6.0) for letter in letters]
    tokenizer = Tokenizer(Unigram(scored, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(list(SPECIAL))
    return json.loads(tokenizer.to_str())


def write_folder(folder: Path, definition: dict[str, Any], **files: Any) -> Path:
    """A model folder as far as a tokeniser's reader looks at it; `files` are JSON files by their stems."""
    ids = [len(definition["model"]["vocab"]) - 1, *(token["id"] for token in definition["added_tokens"])]
    vocab_size = max(ids) + 1 + 5
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size}
    written = {
        "config": {},
        "tokenizer": definition,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
        **files,
    }
    written["config"] = config | written["config"]
    folder.mkdir(exist_ok=True)
    for stem, content in written.items():
        if content is not None:
            (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _train(tokenizer: Tokenizer, corpus: Iterable[str]) -> None:
    """On the ASCII of it: other characters are spelled by their bytes."""
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    tokenizer.train_from_iterator((text for text in corpus if text.isascii()), trainer)


def _without_added_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if token["content"] in SPECIAL
    ]
    return definition
