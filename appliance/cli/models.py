"""`appliance pull | list | rm`: the models on this machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from appliance.catalogue import ModelSpec, load_catalogue
from appliance.cli.console import note, say
from appliance.model_files import looks_like_path
from appliance.pull.transfer import human_bytes
from appliance.settings import Settings, load_settings
from appliance.store import InstalledModel, Store

if TYPE_CHECKING:
    from appliance.pull.install import Pulled
    from appliance.pull.progress import PullProgress

INTERRUPTED = 130

DownloadDir = Annotated[Path | None, typer.Option("--download-dir", help="Folder that holds the models.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="NAME|PATH", help="A model to fetch, or a .gguf or model folder of yours."),
    ],
    name: Annotated[str | None, typer.Option("--name", help="What to call your own model.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy your own model, don't link to it.")] = False,
    download_dir: DownloadDir = None,
) -> None:
    """Fetch a model of the catalogue, or add one that you have: a GGUF file, or a folder of safetensors."""
    # Here, because `list` and `show` should not wait for a progress bar.
    from appliance.pull.progress import PullProgress

    settings = load_settings({"download_dir": download_dir})
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        with PullProgress() as progress:
            pulled = _pull(model, name, copy, settings, progress)
    except KeyboardInterrupt:
        note(f"interrupted; `appliance pull {model}` goes on, or starts afresh")
        raise typer.Exit(INTERRUPTED) from None
    manifest = pulled.model.manifest
    if not pulled.is_new:
        say(f"{pulled.model.name} is already installed")
    elif manifest.linked:
        say(f"{pulled.model.name} is installed, linked to {manifest.source}")
    else:
        say(f"{pulled.model.name} is installed ({human_bytes(manifest.size)})")


def _pull(model: str, name: str | None, copy: bool, settings: Settings, progress: PullProgress) -> Pulled:
    # Here, because reading GGUF needs numpy, and `list` and `show` should not wait for it.
    from appliance.pull import local, orchestrate

    store = Store(settings.download_dir)
    if looks_like_path(model):
        return local.copy(model, name, store, progress) if copy else local.link(model, name, store)
    if name or copy:
        option = "--name" if name else "--copy"
        raise typer.BadParameter(
            f"{option} is for a file or folder of your own; if it is one, write ./{model}"
        )
    return orchestrate.pull(model, store, load_catalogue(settings.config_dir), progress)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def list_models(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also what the catalogue has.")] = False,
    as_json: AsJson = False,
    download_dir: DownloadDir = None,
) -> None:
    """List the installed models."""
    settings = load_settings({"download_dir": download_dir})
    listing = Store(settings.download_dir).list()
    rows = [installed_row(model) for model in listing.models]
    if every:
        present = {model.name for model in listing.models}
        specs = load_catalogue(settings.config_dir).models.values()
        rows += [spec_row(spec) for spec in specs if spec.name not in present]
    for sentence in listing.damaged:
        note(f"warning: {sentence}")
    if as_json:
        say(json.dumps(rows, indent=2))
    elif rows:
        _print_table(rows)
    else:
        note("no model is installed; `appliance list --all` shows what there is to pull")


def _print_table(rows: list[dict[str, Any]]) -> None:
    titles = ("NAME", "SIZE", "FORMAT", "CONTEXT", "LICENSE", "STATUS")
    lines = [titles] + [
        (
            row["name"],
            human_bytes(row["size"]),
            row["format"],
            str(row["context"] or "?"),
            row["license"] or "?",
            "linked" if row.get("linked") else row["status"],
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def rm(
    model: Annotated[str, typer.Argument(metavar="NAME", help="An installed model.")],
    download_dir: DownloadDir = None,
) -> None:
    """Remove a model, and what an interrupted pull of it left. A linked file itself stays."""
    settings = load_settings({"download_dir": download_dir})
    removed = Store(settings.download_dir).remove(model)
    say(f"{removed.name} is removed ({human_bytes(removed.freed_bytes)} given back)")


def installed_row(model: InstalledModel) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(model.manifest)
    return {"name": fields.pop("name"), "status": "installed", "path": str(model.path), **fields}


def spec_row(spec: ModelSpec) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(spec)
    row["source"] = ", ".join(str(source) for source in spec.sources)
    del row["sources"]
    return row
