"""The progress of an offline batch, on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@contextlib.contextmanager
def generation_progress(num_prompts: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields what is to be called with the numbers of new tokens and of prompts that have ended."""
    console = Console(stderr=True)
    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]:.0f} tok/s"),
    )
    began, tokens = time.monotonic(), 0
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=num_prompts, speed=0.0)

        def advance(num_tokens: int, num_ended: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(task, advance=num_ended, speed=tokens / max(1e-9, time.monotonic() - began))

        yield advance
