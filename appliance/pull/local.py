"""Models that the user already has: a GGUF file or a model folder, linked where it is or copied."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.model_files import files_of, find_model, model_name, size_of
from appliance.names import ModelName
from appliance.pull.install import MODEL_FILE, MODEL_FOLDER, Pulled, install, installed_as, name_taken, now
from appliance.pull.transfer import (
    Progress,
    PullError,
    require_space,
    sha256_of_all,
    sha256_of_model,
    write_verified,
)
from appliance.quant.architectures import GGUF_ARCHITECTURES
from appliance.quant.errors import CheckpointError
from appliance.quant.report import report
from appliance.store import InstalledModel, Manifest, Store

_REMEDY = "choose another name with --name, or remove that one first"


@dataclass(frozen=True, slots=True)
class Description:
    """What a model says of itself.

    Attributes:
        architecture: as the catalogue writes it: "LlamaForCausalLM".
        context: tokens.
        license: "" where it does not say.
        size: bytes.
    """

    architecture: str
    format: str
    context: int
    license: str
    size: int


def describe(path: Path) -> Description:
    """Read a model's headers and check that it is one we can run.

    Raises:
        PullError: it is damaged, or of an architecture or format that cannot be run; says which can.
    """
    try:
        found = report(path)
        spec = read_spec(found.architecture, found.metadata, found.weight_names)
        size = size_of(path)
    except (UnsupportedModelError, CheckpointError, OSError) as error:
        raise PullError(f"{path.name} cannot be used: {error}") from None
    return Description(
        architecture=GGUF_ARCHITECTURES.get(found.architecture, found.architecture),
        format=f"{found.container} {found.main_format}",
        context=spec.context_len,
        license=str(found.metadata.get("general.license") or ""),
        size=size,
    )


def link(path: str, name: str | None, store: Store) -> Pulled:
    """Install the user's own model by a link to where it is.

    Args:
        path: a `.gguf` file, a folder holding exactly one, or a model folder.
        name: what to call it; None: after the file or folder.

    Raises:
        ModelFilesError: there is no model at that path.
        StoreError: another process is pulling under that name.
        ModelNameError: the name is none, or none can be made of the file's.
        PullError: the model cannot be run, or another has the name.
    """
    source, full = _locate(path, name)
    description = describe(source)
    with store.locked(full):
        installed = installed_as(store, full)
        if installed is not None:
            if os.path.samefile(installed.path, source) or _same_bytes(installed, source, description.size):
                return Pulled(installed, is_new=False)
            raise name_taken(full, installed.manifest, _REMEDY)

        def fill(target: Path) -> Manifest:
            target.symlink_to(source)
            return _manifest(full, source, description, sha256="", linked=True)

        return install(store, full, _stored_as(source), fill)


def copy(path: str, name: str | None, store: Store, progress: Progress) -> Pulled:
    """Install a copy of the user's own model; one that was linked becomes a copy.

    Raises:
        as `link`, and PullError when there is no room for it.
    """
    source, full = _locate(path, name)
    description = describe(source)
    with store.locked(full):
        installed = installed_as(store, full)
        if installed is not None and not _is_link_to(installed, source):
            if _same_bytes(installed, source, description.size):
                return Pulled(installed, is_new=False)
            raise name_taken(full, installed.manifest, _REMEDY)

        def fill(target: Path) -> Manifest:
            require_space(target.parent, description.size)
            sha256 = _copy_model(source, target, progress)
            # The user's folder may have changed since it was described.
            copied = replace(description, size=size_of(target))
            return _manifest(full, source, copied, sha256=sha256, linked=False)

        return install(store, full, _stored_as(source), fill)


def _copy_model(source: Path, target: Path, progress: Progress) -> str:
    """Copy every file of a model; the hash of the whole."""
    if source.is_dir():
        target.mkdir()
    hashes = {}
    for file in files_of(source):
        place = target / file.name if source.is_dir() else target
        size = file.stat().st_size
        progress.begin(f"copying {file.name}" if source.is_dir() else "copying", size)
        with file.open("rb") as opened:
            hashes[file.name] = write_verified(opened, place, size, "", progress)
    return sha256_of_all(hashes)


def _stored_as(source: Path) -> str:
    return MODEL_FOLDER if source.is_dir() else MODEL_FILE


def _is_link_to(installed: InstalledModel, source: Path) -> bool:
    return installed.manifest.linked and os.path.samefile(installed.path, source)


def _locate(path: str, name: str | None) -> tuple[Path, ModelName]:
    source = find_model(Path(path))
    return source, (ModelName.parse(name) if name else model_name(source)).with_tag()


def _manifest(full: ModelName, source: Path, description: Description, sha256: str, linked: bool) -> Manifest:
    return Manifest(
        name=str(full),
        file=_stored_as(source),
        size=description.size,
        sha256=sha256,
        source=str(source),
        license=description.license,
        architecture=description.architecture,
        format=description.format,
        context=description.context,
        linked=linked,
        created=now(),
    )


def _same_bytes(installed: InstalledModel, source: Path, size: int) -> bool:
    if not installed.manifest.sha256 or installed.manifest.size != size:
        return False
    return sha256_of_model(source) == installed.manifest.sha256
