"""`appliance show`: what a model is, and what its weights are stored as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.catalogue import Catalogue, load_catalogue
from appliance.cli.console import note, say
from appliance.cli.models import AsJson, DownloadDir, installed_row, spec_row
from appliance.model_files import find_model, looks_like_path, size_of
from appliance.names import ModelName, choose
from appliance.pull.transfer import sha256_of_model
from appliance.settings import load_settings
from appliance.store import Store, StoreError

_UNITS = {"size": " bytes", "context": " tokens"}
_NAMES_SHOWN = 6


def show(
    model: Annotated[
        str, typer.Argument(metavar="NAME|PATH", help="A model, installed or not, or a path to one.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check the hash.")] = False,
    as_json: AsJson = False,
    download_dir: DownloadDir = None,
) -> None:
    """Show what is known of a model, and the formats of its weights."""
    settings = load_settings({"download_dir": download_dir})
    row = _find(model, Store(settings.download_dir), load_catalogue(settings.config_dir))
    if "path" in row:
        row |= {field: value for field, value in _weights(Path(row["path"])).items() if field not in row}
        if verify:
            row["verified"] = _verified(row)
    elif verify:
        raise StoreError(f"{row['name']} is not installed, so there is nothing to verify")
    if as_json:
        say(json.dumps(row, indent=2))
        return
    notes = row.pop("notes", [])
    for field, value in row.items():
        for title, text in _lines(field, value):
            say(f"{title:<14}{text}")
    for sentence in notes:
        note(f"note: {sentence}")


def _find(model: str, store: Store, catalogue: Catalogue) -> dict[str, Any]:
    if looks_like_path(model):
        path = find_model(Path(model))
        return {"path": str(path), "size": size_of(path)}
    try:
        return installed_row(store.get(model))
    except StoreError:
        # Not installed, or damaged, which has to be said; the catalogue answers for the rest.
        if choose(ModelName.parse(model), [str(full) for full in store.names()]):
            raise
        return spec_row(catalogue.find(model))


def _weights(path: Path) -> dict[str, Any]:
    """Bytes by kind, and which matrices are dense."""
    # Here, because reading headers needs numpy.
    from appliance.quant.report import report

    found = report(path)
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for layer in found.layers:
        kind = kinds.setdefault(
            (layer.format, layer.detail),
            {"format": layer.format, "detail": layer.detail, "matrices": 0, "weights": 0, "bytes": 0},
        )
        kind["matrices"] += 1
        kind["weights"] += layer.elements
        kind["bytes"] += layer.nbytes
    return {
        "architecture": found.architecture,
        "weights": sorted(kinds.values(), key=lambda kind: -int(kind["bytes"])),
        "dense": [layer.name for layer in found.layers if layer.is_dense],
        "vector_bytes": found.vector_bytes,
        "notes": list(found.notes),
    }


def _verified(row: dict[str, Any]) -> str:
    """Raises StoreError where the hash is another than when the model was installed."""
    found = sha256_of_model(Path(row["path"]))
    known = row.get("sha256")
    if not known:
        return f"sha256 is {found}; nothing is known to compare it with"
    if found != known:
        raise StoreError(
            f"{row['name']} is damaged: its sha256 is {found}, expected {known}; "
            f"`appliance rm {row['name']}` and pull it again"
        )
    return "every byte, by its sha256"


def _lines(field: str, value: Any) -> list[tuple[str, str]]:
    """Title and text of each line that a field takes."""
    if value in ("", None, False, [], {}):
        return []
    if field == "weights":
        kinds = [_kind(kind) for kind in value]
        return [(field if index == 0 else "", text) for index, text in enumerate(kinds)]
    if field == "dense":
        others = f" and {len(value) - _NAMES_SHOWN} others" if len(value) > _NAMES_SHOWN else ""
        return [(field, ", ".join(value[:_NAMES_SHOWN]) + others)]
    if field == "vector_bytes":
        return [("norms, biases", f"{value:,} bytes")]
    unit = _UNITS.get(field)
    return [(field, str(value) if unit is None else f"{value:,}{unit}")]


def _kind(kind: dict[str, Any]) -> str:
    detail = f", {kind['detail']}" if kind["detail"] else ""
    plural = "matrix" if kind["matrices"] == 1 else "matrices"
    return f"{kind['format']}{detail}: {kind['matrices']} {plural}, {kind['bytes']:,} bytes"
