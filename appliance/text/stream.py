"""Token ids to text as they come: whole characters only, and never a letter of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class HasTokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """The text of one generated sequence.

    The text ends before the stop string that is complete first; of two that are complete at the same
    character, before the longer. What `push` returns never has to be taken back: only an incomplete
    character, or an ending that a stop string could begin with, is held until more is known. So the deltas
    concatenate to the same text, however the ids are split over calls.

    Args:
        stop: strings that end the text before them.
        min_tokens: the text of so many ids is passed on without looking for stop strings in it.

    Attributes:
        stopped: the stop string that ended the text, None while none has.
        tokens_used: ids consumed, up to and including the one that completed the stop string.
    """

    def __init__(self, tokenizer: HasTokenBytes, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty; it would end every text at once")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._sent: list[str] = []
        self._finished = False
        self.stopped: str | None = None
        self.tokens_used = 0

    def push(self, token_ids: Iterable[int]) -> str:
        """Take further ids; what may be sent now. After a stop string, ids are ignored.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        assert not self._finished, "push after finish"
        deltas = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self.tokens_used += 1
            deltas.append(
                self._pass_on(text) if self.tokens_used <= self._min_tokens else self._advance(text)
            )
        return "".join(deltas)

    def finish(self) -> str:
        """End the sequence; what was held back, an incomplete character as U+FFFD. Later calls return ""."""
        if self._finished or self.stopped is not None:
            return ""
        self._finished = True
        delta = self._advance(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            delta += self._release(len(self._held))
        return delta

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._sent)

    def _pass_on(self, text: str) -> str:
        self._held = text
        return self._release(len(text))

    def _advance(self, text: str) -> str:
        if not text:
            return ""
        self._held += text
        end, start = len(self._held) + 1, 0
        for stop in self._stop:
            found = self._held.find(stop)
            if found >= 0 and (found + len(stop), found) < (end, start):
                end, start, self.stopped = found + len(stop), found, stop
        return self._release(start if self.stopped is not None else self._safe())

    def _safe(self) -> int:
        """How much of the held text no stop string can begin in."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            ending = self._held[start:]
            if any(stop.startswith(ending) for stop in self._stop):
                return start
        return len(self._held)

    def _release(self, length: int) -> str:
        delta, self._held = self._held[:length], self._held[length:]
        if delta:
            self._sent.append(delta)
        return delta
