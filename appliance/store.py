"""Installed models on disk: one folder each, `<models_dir>/<name>/<tag>/`, with a manifest and the model.

A folder appears by one rename of a finished one, so a model is either installed or not there. Unfinished
downloads live in `<models_dir>/.partial/`, on the same file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from appliance.engine.packed_files import remove as remove_packed
from appliance.files import open_lock, sync
from appliance.model_files import CONFIG, find_model, looks_like_path, model_name, size_of
from appliance.names import ModelError, ModelName, choose, did_you_mean
from appliance.sampling import SamplingDefaults

MANIFEST = "manifest.json"
PARTIAL = ".partial"


class StoreError(ModelError):
    """A model is not installed, its folder is damaged, or the disk refuses."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of an installed model, kept beside its file as `manifest.json`.

    Attributes:
        file: name of the model's file or folder (or of the link to it) in the folder.
        size: bytes.
        sha256: of the file, or of the list of a folder's files and hashes; "" where it was linked and so never
            read through.
        source: where it came from, for people.
        license: "" where the file does not say.
        context: tokens; 0 where the file does not say.
        sampling: what its makers recommend.
        linked: it is a link to what the user keeps elsewhere.
        created: when it was installed, ISO 8601 in UTC.
    """

    name: str
    file: str
    size: int
    source: str
    architecture: str
    format: str
    created: str
    sha256: str = ""
    license: str = ""
    context: int = 0
    linked: bool = False
    sampling: SamplingDefaults = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A model that can be loaded, installed or not.

    Attributes:
        name: what it is called: a full name, or for a plain file the name that its stem makes.
        path: absolute path of the model's file or folder.
    """

    name: str
    path: Path

    @property
    def sampling(self) -> SamplingDefaults:
        return SamplingDefaults()

    def hold(self) -> IO[bytes]:
        """Keep `Store.remove` away from the model until what this returns is closed, or the process ends.

        Raises:
            StoreError: it is not there any more.
        """
        try:
            return self._guarded().open("rb")
        except OSError as error:
            raise StoreError(f"{self.name} cannot be opened: {error}") from None

    def _guarded(self) -> Path:
        return self.path / CONFIG if self.path.is_dir() else self.path


@dataclass(frozen=True, slots=True)
class InstalledModel(ModelPath):
    """A model in the store, with what is known of it."""

    manifest: Manifest

    @property
    def sampling(self) -> SamplingDefaults:
        return self.manifest.sampling

    def hold(self) -> IO[bytes]:
        manifest = ModelPath.hold(self)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(manifest, fcntl.LOCK_SH)
        return manifest

    def _guarded(self) -> Path:
        return self.path.with_name(MANIFEST)


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything in a store: the models by name, and one sentence for each folder that is damaged."""

    models: tuple[InstalledModel, ...]
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed, and how many bytes of disk that gave back (next to none for a linked model)."""

    name: str
    freed_bytes: int


class Store:
    """The models in one folder. The folder need not exist until something is installed."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = Path(os.path.abspath(models_dir))

    def list(self) -> Listing:
        """What is installed. A damaged folder is reported and hides no other."""
        models, damaged = [], []
        for name in self.names():
            try:
                models.append(self._read(name))
            except StoreError as error:
                damaged.append(str(error))
        return Listing(tuple(models), tuple(damaged))

    def get(self, name: str) -> InstalledModel:
        """The installed model called `name`; a tag may be left out when only one is installed.

        Raises:
            StoreError: not installed (says what is), ambiguous, or damaged.
            ModelNameError: `name` is no name at all.
        """
        return self._read(self._find(name))

    def resolve(self, name_or_path: str) -> ModelPath:
        """An installed model by name, or any model by path, as `find_model`.

        Raises:
            StoreError: as `get`.
            ModelFilesError: there is no model at that path.
        """
        if looks_like_path(name_or_path):
            path = find_model(Path(name_or_path))
            return ModelPath(str(model_name(path)), path)
        try:
            return self.get(name_or_path)
        except StoreError as error:
            if Path(name_or_path).exists():
                raise StoreError(
                    f"{error}; for the folder of that name here, write ./{name_or_path}"
                ) from None
            raise

    def remove(self, name: str) -> Removed:
        """Remove a model and what an interrupted pull of it left; of a linked model, the link only.

        Raises:
            StoreError: there is no such model and no rest of one, a pull of it is going on, or it is in use.
        """
        full = self._find_any(name)
        with self.locked(full), self._unused(full):
            freed = self._remove_packed(full)
            freed += _tree_bytes(self.folder(full)) + _tree_bytes(self.partial_dir(full))
            self._discard(full)
            shutil.rmtree(self.partial_dir(full), ignore_errors=True)
        return Removed(str(full), freed)

    def folder(self, full: ModelName) -> Path:
        return self.models_dir / full.name / full.tag

    def partial_dir(self, full: ModelName) -> Path:
        """Where an unfinished pull of this model keeps its files, between runs."""
        return self.models_dir / PARTIAL / str(full)

    def commit(self, full: ModelName, staging: Path) -> InstalledModel:
        """Make the finished folder `staging` (on the same file system) this model, at once and for good."""
        _sync_tree(staging)
        self._discard(full)
        target = self.folder(full)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(target)
        sync(target.parent)
        sync(self.models_dir)
        return self._read(full)

    @contextlib.contextmanager
    def locked(self, full: ModelName) -> Iterator[None]:
        """Be the only process that changes this model. The lock ends with the process, however it ends.

        Raises:
            StoreError: another process has it; or the models' folder cannot be written.
        """
        path = self.models_dir / PARTIAL / f"{full}.lock"
        try:
            handle = open_lock(path, 0o644)
        except OSError as error:
            raise StoreError(f"cannot write to {path.parent}: {error}; see --download-dir") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise StoreError(f"{full} is being changed by process {holder or '?'}; wait for it") from None
        try:
            os.truncate(handle, 0)
            os.write(handle, str(os.getpid()).encode())
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _unused(self, full: ModelName) -> Iterator[None]:
        """Let nobody `hold` the model; StoreError if somebody does."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                manifest = stack.enter_context((self.folder(full) / MANIFEST).open("rb"))
                try:
                    fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StoreError(
                        f"{full} is in use; end the daemon or program that has it loaded first"
                    ) from None
                except OSError:  # a file system without locks
                    pass
            yield

    def names(self) -> tuple[ModelName, ...]:
        """The full names of all folders, damaged ones too."""
        folders = (folder for folder in self.models_dir.glob("[!.]*/[!.]*") if folder.is_dir())
        names = (f"{folder.parent.name}:{folder.name}" for folder in folders)
        return tuple(sorted(ModelName.parse(name) for name in names if _is_name(name)))

    def _find(self, name: str) -> ModelName:
        installed = [str(full) for full in self.names()]
        found = choose(ModelName.parse(name), installed)
        if len(found) > 1:
            raise StoreError(f"{name!r} may mean {', '.join(found)}; give the tag too")
        if not found:
            what = f"installed: {', '.join(installed)}" if installed else f"nothing is in {self.models_dir}"
            raise StoreError(
                f"no model called {name!r} is installed{did_you_mean(name, installed)} ({what}); "
                "`appliance pull` installs one"
            )
        return ModelName.parse(found[0])

    def _find_any(self, name: str) -> ModelName:
        """As `_find`, but also a model of which there is only what an interrupted pull left."""
        partial = self.models_dir / PARTIAL
        rests = [path.name for path in partial.iterdir() if path.is_dir()] if partial.is_dir() else []
        installed = [str(full) for full in self.names()]
        found = choose(ModelName.parse(name), {*rests, *installed})
        return ModelName.parse(found[0]) if len(found) == 1 else self._find(name)

    def _read(self, full: ModelName) -> InstalledModel:
        folder = self.folder(full)
        mend = f"`appliance rm {full}` removes it"
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise StoreError(f"{full} is damaged: {folder} has no {MANIFEST}; {mend}") from None
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(f"{full} is damaged: {folder / MANIFEST}: {error}; {mend}") from None
        path = folder / manifest.file
        if Path(manifest.file).name != manifest.file or manifest.name != str(full):
            raise StoreError(
                f"{full} is damaged: {folder / MANIFEST} is of {manifest.name!r} and file {manifest.file!r}; "
                f"{mend}"
            )
        try:
            size = size_of(path)
        except OSError:
            gone = f"its link to {os.readlink(path)} is broken" if path.is_symlink() else f"{path} is missing"
            raise StoreError(f"{full} is damaged: {gone}; {mend}") from None
        if size != manifest.size and not manifest.linked:
            raise StoreError(f"{full} is damaged: {path} has {size} bytes, expected {manifest.size}; {mend}")
        return InstalledModel(str(full), path, manifest)

    def _remove_packed(self, full: ModelName) -> int:
        """Delete the repacked weights of a model, which may lie elsewhere; how many bytes they had."""
        try:
            return remove_packed(self._read(full).path)
        except StoreError:  # damaged, or an unfinished pull
            return 0

    def _discard(self, full: ModelName) -> None:
        """Take a model's folder out of sight by one rename, then delete it."""
        folder = self.folder(full)
        if not folder.exists():
            return
        doomed = self.partial_dir(full) / "removed"
        shutil.rmtree(doomed, ignore_errors=True)
        doomed.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):  # other tags are left
            folder.parent.rmdir()


def _is_name(text: str) -> bool:
    try:
        return str(ModelName.parse(text)) == text
    except ModelError:
        return False


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            sync(path)
