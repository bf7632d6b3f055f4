"""The last step of every pull: a finished folder becomes the model, unless something else has its name."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from appliance.names import ModelName
from appliance.pull.transfer import PullError
from appliance.store import MANIFEST, InstalledModel, Manifest, Store, StoreError

# What a model is stored as, in its folder.
MODEL_FILE = "model.gguf"
MODEL_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class Pulled:
    """An installed model, and whether this pull installed it (or found it there already)."""

    model: InstalledModel
    is_new: bool


def installed_as(store: Store, full: ModelName) -> InstalledModel | None:
    """The sound model of this name, None where there is none or a damaged one, which a pull may replace."""
    with contextlib.suppress(StoreError):
        return store.get(str(full))
    return None


def name_taken(full: ModelName, manifest: Manifest, remedy: str) -> PullError:
    return PullError(f"{full} is already installed, from {manifest.source}; {remedy}")


def install(store: Store, full: ModelName, stored_as: str, fill: Callable[[Path], Manifest]) -> Pulled:
    """Let `fill` put the model at a path of that name in a fresh folder, then make that folder the model.

    The caller holds the model's lock. What `fill` keeps in the partial folder for a next try stays.
    """
    partial = store.partial_dir(full)
    staging = partial / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        manifest = fill(staging / stored_as)
        (staging / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        model = store.commit(full, staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):  # something is kept there
            partial.rmdir()
        raise
    shutil.rmtree(partial, ignore_errors=True)
    return Pulled(model, is_new=True)


def now() -> str:
    """The time, as manifests have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
