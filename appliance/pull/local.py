"""Models that the user already has: a GGUF file, linked where it is or copied."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.names import ModelName
from appliance.pull.install import MODEL_FILE, Pulled, install, installed_as, name_taken, now
from appliance.pull.transfer import Progress, PullError, require_space, sha256_of, write_verified
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.file import GGUFFile
from appliance.quant.gguf.supported import ARCHITECTURES, TENSOR_TYPES
from appliance.store import InstalledModel, Manifest, Store, model_file

_REMEDY = "choose another name with --name, or remove that one first"


@dataclass(frozen=True, slots=True)
class Description:
    """What a GGUF file says of itself.

    Attributes:
        architecture: as the catalogue writes it: "LlamaForCausalLM".
        context: tokens.
        license: "" where the file does not say.
        size: bytes.
    """

    architecture: str
    format: str
    context: int
    license: str
    size: int


def describe(path: Path) -> Description:
    """Open the file and check that it is one we can run.

    Raises:
        PullError: not a sound GGUF file, or of an architecture or type that cannot be run; says which can.
    """
    try:
        with GGUFFile(path) as file:
            metadata = file.metadata
            nbytes: dict[str, int] = {}
            for tensor in file.tensors.values():
                nbytes[tensor.type.name] = nbytes.get(tensor.type.name, 0) + tensor.nbytes
    except (CheckpointError, OSError) as error:
        raise PullError(f"{path} cannot be used: {error}") from None
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise PullError(f"{path} is one of {parts} parts; merge them into one file first (gguf-split)")
    unread = sorted(set(nbytes) - set(TENSOR_TYPES))
    if unread or not nbytes:
        found = f"tensors of type {', '.join(unread)}" if unread else "no tensors"
        raise PullError(f"{path} has {found}; what can be run: {', '.join(TENSOR_TYPES)}")
    try:
        spec = read_spec(str(metadata.get("general.architecture")), metadata, frozenset())
    except (UnsupportedModelError, CheckpointError) as error:
        raise PullError(f"{path} cannot be run: {error}") from None
    return Description(
        architecture=ARCHITECTURES[spec.architecture],
        format=f"GGUF {max(nbytes, key=lambda name: nbytes[name])}",
        context=spec.context_len,
        license=str(metadata.get("general.license") or ""),
        size=path.stat().st_size,
    )


def link(path: str, name: str | None, store: Store) -> Pulled:
    """Install the user's own GGUF file by a link to where it is.

    Args:
        path: a `.gguf` file, or a folder holding exactly one.
        name: what to call it; None: after the file.

    Raises:
        StoreError: no such file, or another process is pulling under that name.
        ModelNameError: the name is none, or none can be made of the file's.
        PullError: the file cannot be run, or another model has the name.
    """
    file, full = _locate(path, name)
    description = describe(file)
    with store.locked(full):
        installed = installed_as(store, full)
        if installed is not None:
            if os.path.samefile(installed.path, file) or _same_bytes(installed, file, description.size):
                return Pulled(installed, is_new=False)
            raise name_taken(full, installed.manifest, _REMEDY)

        def fill(target: Path) -> Manifest:
            target.symlink_to(file)
            return _manifest(full, file, description, sha256="", linked=True)

        return install(store, full, fill)


def copy(path: str, name: str | None, store: Store, progress: Progress) -> Pulled:
    """Install a copy of the user's own GGUF file; one that was linked becomes a copy.

    Raises:
        as `link`, and PullError when there is no room for it.
    """
    file, full = _locate(path, name)
    description = describe(file)
    with store.locked(full):
        installed = installed_as(store, full)
        if installed is not None and not _is_link_to(installed, file):
            if _same_bytes(installed, file, description.size):
                return Pulled(installed, is_new=False)
            raise name_taken(full, installed.manifest, _REMEDY)

        def fill(target: Path) -> Manifest:
            require_space(target.parent, description.size)
            progress.begin("copying", description.size)
            with file.open("rb") as source:
                sha256 = write_verified(source, target, description.size, "", progress)
            return _manifest(full, file, description, sha256=sha256, linked=False)

        return install(store, full, fill)


def _is_link_to(installed: InstalledModel, file: Path) -> bool:
    return installed.manifest.linked and os.path.samefile(installed.path, file)


def _locate(path: str, name: str | None) -> tuple[Path, ModelName]:
    file = model_file(Path(path))
    return file, (ModelName.parse(name) if name else ModelName.from_stem(file.stem)).with_tag()


def _manifest(full: ModelName, file: Path, description: Description, sha256: str, linked: bool) -> Manifest:
    return Manifest(
        name=str(full),
        file=MODEL_FILE,
        size=description.size,
        sha256=sha256,
        source=str(file),
        license=description.license,
        architecture=description.architecture,
        format=description.format,
        context=description.context,
        linked=linked,
        created=now(),
    )


def _same_bytes(installed: InstalledModel, file: Path, size: int) -> bool:
    if not installed.manifest.sha256 or installed.manifest.size != size:
        return False
    with file.open("rb") as source:
        return sha256_of(source) == installed.manifest.sha256
