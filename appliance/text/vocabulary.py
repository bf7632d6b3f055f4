"""What the reader of a checkpoint's tokeniser delivers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a `Tokenizer`, which see for the attributes of the same names.

    Attributes:
        token_bytes: what each token adds to a text; ids that are not in it add nothing.
        control: how tokens that add nothing are written in a prompt.
        plain: the `tokenizers.Tokenizer` that takes the text of a control token for text like any other.
        parsing: the one that makes it that token. Neither adds anything before or after the text.
        prefixes_space: whether a text gets a space before it when it is encoded, and loses it when decoded.
    """

    token_bytes: Mapping[int, bytes]
    control: Mapping[int, str]
    plain: Any
    parsing: Any
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    adds_bos: bool
    longest_token_bytes: int
    chat_template: str | None
    named_tokens: Mapping[str, str]
    prefixes_space: bool = False


def _byte_characters() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable Latin-1 stands for itself, the rest follows from U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in itself]
    stand_ins = {chr(byte): byte for byte in itself}
    return stand_ins | {chr(256 + index): byte for index, byte in enumerate(shifted)}


_BYTES = _byte_characters()


def byte_level_bytes(text: str) -> bytes:
    """The bytes that a token of byte-level BPE stands for."""
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        # Padding entries and the like are written as they are.
        return text.encode("utf-8", "replace")
