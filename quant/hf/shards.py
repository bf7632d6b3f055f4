"""The tensors of a model folder, whichever files they are in. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.file import TensorInfo, read_header
from appliance.quant.hf.json_file import read_json

INDEX_SUFFIX = ".safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder, from the index where there is one, else from all its safetensors files.

    Raises:
        CheckpointError: no weights, a shard is missing, two hold the same tensor, or the index is at odds with them.
        UnsupportedFormatError: the weights are pickled.
        OSError: a file cannot be read.
    """
    index = _index(folder)
    files = sorted({*index.values()}) or _unindexed(folder)
    if not files:
        raise _no_weights(folder)
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks {name}, which its index lists; fetch the model again")
        for info in read_header(path).values():
            if info.name in tensors:
                raise CheckpointError(f"tensor {info.name!r} is in both {tensors[info.name].file} and {path}")
            tensors[info.name] = info
    for tensor, name in index.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(
                f"{folder}: the index has tensor {tensor!r} in {name}, but it is not there; fetch both again"
            )
    return tensors


def _index(folder: Path) -> dict[str, str]:
    """Tensor name → file name; empty where there is no index."""
    paths = sorted(folder.glob("*" + INDEX_SUFFIX))
    if not paths:
        return {}
    if len(paths) > 1:
        found = ", ".join(path.name for path in paths)
        raise CheckpointError(f"{folder} has several indices ({found}), expected one; remove the wrong ones")
    weight_map: Any = read_json(paths[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{paths[0]}: weight_map is {weight_map!r}, expected tensors and their files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{paths[0]}: tensor {tensor!r} is in {name!r}, expected a .safetensors file of this folder"
            )
    return weight_map


def _unindexed(folder: Path) -> list[str]:
    """The files of a folder without an index: transformers' name, else AutoGPTQ's, else all."""
    for pattern in ("model.safetensors", "gptq_model*.safetensors", "*.safetensors"):
        found = sorted(path.name for path in folder.glob(pattern))
        if found:
            return found
    return []


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return UnsupportedFormatError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code and are never read; convert them: "
            "load the model with transformers where you trust it and save_pretrained(…, safe_serialization=True)"
        )
    return CheckpointError(f"{folder} holds no *.safetensors; fetch the model again")
