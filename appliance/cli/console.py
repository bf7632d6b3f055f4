"""How the commands speak: results on stdout, everything else on stderr, errors as one line."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """A line of result, unwrapped and unstyled, so that it can be piped."""
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """A line that is not the result."""
    sys.stderr.write(text + "\n")


def open_missing_streams() -> None:
    """Let stdin, stdout or stderr that is closed (`>&-`) be the null device.

    Otherwise the next file that is opened would take its number, and hear what is said.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # Open for as long as the process lives.
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
