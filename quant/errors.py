"""Errors of the checkpoint readers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager

# What is quoted from a file may be as long as the file; a message's beginning and end say enough.
_HEAD_CHARS, _TAIL_CHARS = 600, 300


class CheckpointError(ValueError):
    """A checkpoint is corrupt, truncated or at odds with itself.

    The message names the file, the place, what was found and what was expected.
    """

    def __init__(self, message: str) -> None:
        if len(message) > _HEAD_CHARS + _TAIL_CHARS:
            message = f"{message[:_HEAD_CHARS]} … {message[-_TAIL_CHARS:]}"
        super().__init__(message)


class UnsupportedFormatError(CheckpointError):
    """A checkpoint may be sound, but uses a format or feature that is not read; the message names it."""


def and_others(names: Sized) -> str:
    """What follows the first of several names in a message."""
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""


@contextmanager
def located(where: object) -> Iterator[None]:
    """Puts where it happened before the message of a `CheckpointError` that does not say so itself."""
    try:
        yield
    except CheckpointError as error:
        if str(where) in str(error):
            raise
        raise type(error)(f"{where}: {error}") from None
