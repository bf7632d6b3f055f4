"""`appliance bench`: how fast a server is, as its clients see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli.console import note, say
from appliance.settings import load_settings

if TYPE_CHECKING:
    from appliance.bench.client import BenchClient
    from appliance.bench.measure import Bench, Figure, Plan

INTERRUPTED = 130
Url = Annotated[str | None, typer.Option("--url", help="The server, if not the configured daemon.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Its key, where it wants one.")]
Model = Annotated[str | None, typer.Option("--model", help="Which of its models; else the first.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often each thing is done.")]
Output = Annotated[int, typer.Option("--output-tokens", min=2, help="Length of an answer.")]
Prompt = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of a prompt to answer.")]
Prefill = Annotated[int, typer.Option("--prefill-tokens", min=1, help="Length of a prompt only read.")]
Prefix = Annotated[int, typer.Option("--prefix-tokens", min=0, help="Length of a shared beginning; 0: none.")]
Streams = Annotated[str, typer.Option("--streams", help="How many at once, e.g. 1,4,16.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the figures to this file too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def bench(
    url: Url = None,
    api_key: Key = None,
    model: Model = None,
    rounds: Rounds = 5,
    prompt_tokens: Prompt = 32,
    output_tokens: Output = 128,
    prefill_tokens: Prefill = 512,
    prefix_tokens: Prefix = 1024,
    streams: Streams = "1,2,4,8,16",
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server with OpenAI's API: speed of one stream, of several, of prompts, and of prompts seen before.

    Ctrl-C ends it with what was measured until then.
    """
    from appliance.bench.client import BenchClient
    from appliance.bench.measure import Bench, Plan

    settings = load_settings({})
    plan = Plan(rounds, prompt_tokens, output_tokens, prefill_tokens, prefix_tokens, _numbers(streams))
    key = api_key or (next(iter(settings.api_key), None) if url is None else None)
    client = BenchClient(url or settings.url(), key, model)
    runs = Bench(client, plan, tell=note)
    interrupted = _measure(client, runs)
    _check_lengths(runs.figures, plan, client.notes)
    if csv is not None:
        _write_csv(csv, runs.figures)
    if as_json:
        rows = [_fields(figure) for figure in runs.figures]
        counted = "usage" if client.counts_tokens else "frames"
        found = {"url": client.url, "model": client.model, "tokens_counted_by": counted}
        say(json.dumps(found | {"notes": client.notes, "figures": rows}, indent=2))
    else:
        _print_table(runs, client.model, "the server's usage" if client.counts_tokens else "frames")
        for sentence in client.notes:
            note(f"note: {sentence}")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,4,16", param_hint="--streams")
    return numbers


def _measure(client: BenchClient, runs: Bench) -> bool:
    """Whether Ctrl-C ended it."""
    import asyncio

    async def run() -> None:
        async with client:
            await client.connect()
            await runs.run()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        note("interrupted")
        return True
    return False


def _check_lengths(figures: list[Figure], plan: Plan, notes: list[str]) -> None:
    """Say so where answers were shorter than asked for."""
    for figure in figures:
        asked = figure.requests * (plan.output_tokens if figure.name in ("decode", "streams") else 1)
        if figure.output_tokens != asked:
            who = f"{figure.name}, {figure.streams} at once"
            notes.append(f"{who}: the answers have {figure.output_tokens} tokens, asked for were {asked}")


def _fields(figure: Figure) -> dict[str, str | int | float | None]:
    return {name: getattr(figure, name) for name in figure.__slots__}


def _write_csv(path: Path, figures: list[Figure]) -> None:
    from csv import DictWriter

    from appliance.bench.measure import Figure

    with path.open("w", newline="") as file:
        writer = DictWriter(file, list(Figure.__slots__))
        writer.writeheader()
        writer.writerows(_fields(figure) for figure in figures)


def _print_table(runs: Bench, model: str, counted_by: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}; tokens counted by {counted_by}; times in ms: median, 95 %, 99 %")
    for title in (
        "",
        "at once",
        "prompt",
        "tok/s",
        "steady tok/s",
        "first token",
        "between tokens",
        "client CPU",
    ):
        table.add_column(title, justify="left" if not title else "right")
    for figure in runs.figures:
        table.add_row(
            figure.name,
            str(figure.streams),
            str(figure.prompt_tokens or "?"),
            f"{figure.tokens_per_s:.1f}",
            "" if figure.steady_tokens_per_s is None else f"{figure.steady_tokens_per_s:.1f}",
            _times(figure.ttft_p50_s, figure.ttft_p95_s, figure.ttft_p99_s),
            _times(figure.itl_p50_s, figure.itl_p95_s, figure.itl_p99_s),
            f"{figure.client_cpu_s:.2f} of {figure.seconds:.1f} s",
        )
    Console().print(table)


def _times(*seconds: float | None) -> str:
    return "  ".join("" if value is None else f"{1000 * value:.1f}" for value in seconds).strip()
