"""Errors of the checkpoint readers. Imports no torch."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is corrupt, truncated or at odds with itself.

    The message names the file, the place, what was found and what was expected.
    """


class UnsupportedFormatError(CheckpointError):
    """A checkpoint may be sound, but uses a format or feature that is not read; the message names it."""
