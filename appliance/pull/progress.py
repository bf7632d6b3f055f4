"""A pull as people see it, on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress

PLAIN_EVERY_S = 5.0


class PullProgress:
    """Shows a pull on stderr: a bar with rate and time left on a terminal, else a plain line now and then."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._plain = not console.is_terminal
        self._bar = RichProgress(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=self._plain,
        )
        self._task: TaskID | None = None
        self._what, self._total = "", 0
        self._began = self._spoke = 0.0

    def __enter__(self) -> PullProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began = self._spoke = time.monotonic()
        if self._plain:
            _line(f"{what} {total / 1e6:.1f} MB")
        else:
            self._task = self._bar.add_task(what, total=total)

    def at(self, done: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if self._plain and now - self._spoke >= PLAIN_EVERY_S:
            self._spoke = now
            rate = done / (now - self._began)
            left = f", {(self._total - done) / rate:.0f} s left" if rate else ""
            percent = 100 * done // self._total
            _line(f"{self._what} {percent} % of {self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s{left}")


def _line(text: str) -> None:
    sys.stderr.write(text + "\n")
