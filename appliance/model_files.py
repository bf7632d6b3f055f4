"""The files of a model, wherever they are: one GGUF file, or a folder as transformers saves it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from appliance.engine.packed_files import is_packed_file
from appliance.names import ModelError, ModelName

SUFFIX = ".gguf"
CONFIG = "config.json"
_WEIGHTS = re.compile(r"(gptq_)?model.*\.safetensors")


class ModelFilesError(ModelError):
    """A path holds no model, or more than one."""


def looks_like_path(text: str) -> bool:
    """Whether `text` means a file or folder and not a model's name."""
    return os.sep in text or text in (".", "..", "~") or text.lower().endswith(SUFFIX)


def find_model(path: Path) -> Path:
    """The absolute path of a model: a `.gguf` file, the only one in a folder, or a folder with a config.json.

    Raises:
        ModelFilesError: no such file, another kind of file, or not exactly one in the folder.
    """
    path = Path(os.path.abspath(path.expanduser()))
    try:
        if not path.is_dir():
            if path.suffix.lower() != SUFFIX:
                path.stat()
                raise ModelFilesError(
                    f"{path} is no {SUFFIX} file, and no folder with {CONFIG} and *.safetensors"
                )
            with path.open("rb"):
                return path
        names = {file.name for file in path.iterdir() if file.is_file()}
    except OSError as error:
        reason = "no such file or folder" if error.errno == errno.ENOENT else error.strerror
        raise ModelFilesError(f"cannot read {path}: {reason}") from None
    single = sorted(name for name in names if name.lower().endswith(SUFFIX))
    # Makers of GGUF files leave the original's config.json, and other things, beside them.
    if CONFIG in names and (not single or any(_WEIGHTS.match(name) for name in names)):
        return path
    if len(single) != 1:
        found = f"{len(single)} ({', '.join(single[:4])})" if single else "none"
        raise ModelFilesError(
            f"{path} should hold one {SUFFIX} file, found {found}, or {CONFIG} and *.safetensors; "
            "name the file itself"
        )
    return path / single[0]


def model_name(path: Path) -> ModelName:
    """What a model of one's own is called: as its folder, or its file without the suffix.

    Raises:
        ModelNameError: nothing usable is left.
    """
    return ModelName.from_stem(path.name if path.is_dir() else path.stem)


def files_of(path: Path) -> list[Path]:
    """Every file of a model: the file, or what is in the folder (not below it), sorted by name.

    What the engine keeps there of its own is none of them.
    """
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not is_packed_file(file.name))


def size_of(path: Path) -> int:
    """Bytes of a model's files. Raises OSError where one is gone."""
    return sum(file.stat().st_size for file in files_of(path))
