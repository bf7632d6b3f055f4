"""Work that takes a while, as people see it on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 5.0
SHOWN_AFTER_S = 0.5


class Bar:
    """A bar on stderr where that is a terminal; elsewhere it knows when a plain line is due.

    Attributes:
        console: stderr; what is printed there stands above the bar.
        is_drawn: whether there is a terminal that can draw it.
    """

    def __init__(self, *columns: ProgressColumn, transient: bool = False) -> None:
        self.console = Console(stderr=True)
        self.is_drawn = self.console.is_interactive
        self._bar = Progress(*columns, console=self.console, transient=transient, disable=not self.is_drawn)
        self._task: TaskID | None = None
        self._spoke = 0.0

    def begin(self, what: str, total: float, done: float = 0) -> None:
        """A stage starts; it ends where the next one starts."""
        self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done)
        self._bar.start()
        self._spoke = time.monotonic()

    def at(self, done: float) -> bool:
        """So much of the stage is done. Returns whether a plain line should say so."""
        if self._task is not None:
            self._bar.update(self._task, completed=done)
        now = time.monotonic()
        is_due = not self.is_drawn and now - self._spoke >= PLAIN_EVERY_S
        if is_due:
            self._spoke = now
        return is_due

    def stop(self) -> None:
        self._bar.stop()


class LoadProgress:
    """Shows how far a model is loaded: a bar on a terminal, which goes when all is read; nothing if that is soon.

    Args:
        plain: where there is no terminal, say it in a line now and then.
    """

    def __init__(self, name: str, *, plain: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, transient=True)
        self._name, self._plain = name, plain
        self._began = 0.0
        self._is_shown = False

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def at(self, share: float) -> None:
        """So much is read, of 1."""
        now = time.monotonic()
        self._began = self._began or now
        if not self._is_shown and now - self._began >= SHOWN_AFTER_S:
            self._is_shown = True
            self._bar.begin("loading", total=1.0, done=share)
        if self._is_shown and self._bar.at(share) and self._plain:
            write_line(f"loading {self._name} {share:.0%}")
        if share >= 1:
            self._bar.stop()


def write_line(text: str) -> None:
    sys.stderr.write(text + "\n")
