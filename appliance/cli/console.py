"""How the commands speak: results on stdout, everything else on stderr, errors as one line."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A line of result, unwrapped and unstyled, so that it can be piped."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A line that is not the result."""
    sys.stderr.write(text + "\n")
