"""How the tokens of a tokenizer.json are spelled, as its decoder says. No torch.

Steps that are not known are refused: a guess would quietly give other text than the model means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.quant.errors import UnsupportedFormatError
from appliance.text.vocabulary import byte_level_bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a token stands for.

    Attributes:
        byte_level: each character stands for one byte.
        byte_fallback: `<0x0A>` stands for the byte 0A.
        replaced: what is written for what, such as a space for `▁`.
        drops_space: whether one space before the whole text is taken off.
    """

    byte_level: bool
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    drops_space: bool = False

    def token_bytes(self, text: str, is_added: bool) -> bytes:
        """What a token adds to a text. Added tokens of a byte-level vocabulary are written as they are."""
        if self.byte_level:
            return text.encode() if is_added else byte_level_bytes(text)
        byte = _BYTE.fullmatch(text) if self.byte_fallback else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        for found, written in self.replaced:
            text = text.replace(found, written)
        return text.encode()


def read_decoder(steps: Sequence[Mapping[str, Any]]) -> Decoder:
    """The decoder from its steps, as `hf_parts.steps` gives them.

    Raises:
        UnsupportedFormatError: a step, or an order of steps, that is not known.
    """
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoder(byte_level=True)
    replaced: list[tuple[str, str]] = []
    drops_space = False
    for index, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(written)} if (
                found and "Fuse" not in kinds[:index]
            ):
                replaced.append((found, written))
            case {"type": "Metaspace", "replacement": str(found), "prepend_scheme": scheme} if (
                "Fuse" not in kinds[:index]
            ):
                replaced.append((found, " "))
                drops_space = drops_space or scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if "Fuse" in kinds[:index]:
                drops_space = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise _unknown(kinds)
    if not replaced:
        raise _unknown(kinds)
    return Decoder(
        byte_level=False,
        byte_fallback="ByteFallback" in kinds,
        replaced=tuple(replaced),
        drops_space=drops_space,
    )


def _unknown(kinds: Sequence[str]) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"decoder {' + '.join(kinds) or 'none'} is not supported; what works: ByteLevel, Metaspace, or "
        "Replace + ByteFallback + Fuse, and Strip of one space at the start"
    )
