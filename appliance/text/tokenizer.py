"""Text to token ids and back, by the tokeniser that a model carries. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from appliance.text.gguf_tokenizer import read_gguf
from appliance.text.hf_tokenizer import read_folder
from appliance.text.vocabulary import Vocabulary


class Tokenizer:
    """The tokeniser of one model. Safe to use from several threads.

    Attributes:
        vocab_size: ids run from 0 to this, exclusive. The last may be padding, which stands for nothing.
        eos_token_ids: every token that ends generation, sorted.
        bos_token_id: the token that begins a text, None where the model has none.
        adds_bos: whether `encode` puts it there unless told otherwise. Nothing is ever put after a text.
        longest_token_bytes: no token stands for more of a text than this.
        chat_template: source of the model's template, None where it has none.
        named_tokens: the text of tokens that templates know by a name, such as `bos_token`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_ids = vocabulary.eos_token_ids
        self.bos_token_id = vocabulary.bos_token_id
        self.adds_bos = vocabulary.adds_bos and vocabulary.bos_token_id is not None
        self.longest_token_bytes = vocabulary.longest_token_bytes
        self.chat_template = vocabulary.chat_template
        self.named_tokens = vocabulary.named_tokens
        self._bytes, self._control = vocabulary.token_bytes, vocabulary.control
        self._plain, self._parsing = vocabulary.plain, vocabulary.parsing
        self._prefixes_space = vocabulary.prefixes_space

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a GGUF file or a model folder.

        Raises:
            CheckpointError: a file is missing or damaged, or the vocabulary contradicts itself.
            UnsupportedFormatError: a kind of tokeniser that is not known.
            OSError: a file cannot be read.
        """
        return cls(read_folder(Path(path)) if Path(path).is_dir() else read_gguf(path))

    def encode(self, text: str, *, parse_special: bool, add_bos: bool | None = None) -> list[int]:
        """The ids of a text.

        Bytes that the vocabulary lacks are left out, as llama.cpp does, or become the unknown token where a
        folder's tokeniser says so; lone surrogates become U+FFFD.

        Args:
            parse_special: whether the text of a control token, such as `<|im_end|>`, becomes that token.
            add_bos: whether to begin with the BOS token; None asks the model. A rendered chat template has
                written its own, so pass False with it.
        """
        if not text.isascii():
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokenizer = self._parsing if parse_special else self._plain
        # Unlike `encode`, this lets other threads run meanwhile: a long text takes seconds.
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        wanted = self.adds_bos if add_bos is None else add_bos
        return [self.bos_token_id, *ids] if wanted and self.bos_token_id is not None else ids

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word as a continuation writes it: right away, and after a space."""
        found = dict.fromkeys(self._inner_ids(text) for word in words for text in (word, f" {word}"))
        return tuple(ids for ids in found if ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: UTF-8, perhaps part of a character; nothing for control tokens.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id}, but the vocabulary has {self.vocab_size} tokens")
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """How a token is written in a prompt, control tokens included: what a chat template puts for it.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        written = self._control.get(token_id)
        return self.token_bytes(token_id).decode("utf-8", "replace") if written is None else written

    def decode(self, ids: Iterable[int]) -> str:
        """A whole text, from its first token on; bytes that are not UTF-8 become U+FFFD.

        A tokeniser that puts a space before every text takes it off again here. What continues a text keeps
        it: that is for `TextStream`.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        text = b"".join(map(self.token_bytes, ids))
        return (text.removeprefix(b" ") if self._prefixes_space else text).decode("utf-8", "replace")

    def _inner_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text that follows another, so without a space that is put before whole texts."""
        before = "\n" if self._prefixes_space else ""
        ids = self.encode(before + text, parse_special=False, add_bos=False)
        return tuple(ids[len(self.encode(before, parse_special=False, add_bos=False)) :])
