"""Writes layers as compressed-tensors stores them, one code at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from appliance.quant.hf.module import Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.hf.shards import read_tensors

Tensors = dict[str, torch.Tensor]
NAME = "model.layers.0.mlp.up_proj"


def config(**weights: Any) -> QuantConfig:
    """One group for every linear layer."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return QuantConfig("config.json", "compressed-tensors", raw={"config_groups": groups})


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [M, count] → int32 [M, words]: a row is one number, its codes from the lowest bits up."""
    words = -(-codes.shape[1] * bits // 32)
    numbers = [sum(int(code) << (place * bits) for place, code in enumerate(row)) for row in codes]
    data = b"".join(number.to_bytes(4 * words, "little") for number in numbers)
    return torch.from_numpy(np.frombuffer(data, dtype="<i4").reshape(len(codes), words).copy())


def padded(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [M, count] → int32 [M, words]: as many codes in each word as fit whole."""
    per_word = 32 // bits
    words = [stream(codes[:, start : start + per_word], bits) for start in range(0, codes.shape[1], per_word)]
    return torch.cat(words, dim=1)


def module(folder: Path, tensors: Tensors, shape: tuple[int, int]) -> Module:
    """A layer of a file of its own, by suffix."""
    save_file(
        {f"{NAME}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()},
        folder / "x.safetensors",
    )
    infos = read_tensors(folder)
    return Module(NAME, shape, {suffix: infos[f"{NAME}.{suffix}"] for suffix in tensors})


def edited(
    source: Path,
    folder: Path,
    change_config: Callable[[dict[str, Any]], Any] = lambda _config: None,
    change_tensors: Callable[[Tensors], Any] = lambda _tensors: None,
) -> Path:
    """A copy of a model with its quantisation's configuration and its tensors changed in place."""
    whole = json.loads((source / "config.json").read_text())
    change_config(whole["quantization_config"])
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(source / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder
