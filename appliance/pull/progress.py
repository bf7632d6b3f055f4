"""A pull as people see it, on stderr."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from appliance.progress import Bar, write_line


class PullProgress:
    """Shows a pull on stderr: a bar with rate and time left on a terminal, else a plain line now and then."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._what, self._total = "", 0
        self._began = 0.0

    def __enter__(self) -> PullProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began = time.monotonic()
        self._bar.begin(what, total)
        if not self._bar.is_drawn:
            write_line(f"{what} {total / 1e6:.1f} MB")

    def at(self, done: int) -> None:
        if self._bar.at(done):
            rate = done / (time.monotonic() - self._began)
            left = f", {(self._total - done) / rate:.0f} s left" if rate else ""
            percent = 100 * done // self._total
            write_line(f"{self._what} {percent} % of {self._total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s{left}")
