"""What a checkpoint is made of, from its headers: for people, and for refusals before anything is read. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from appliance.quant.gguf.file import GGUFFile
from appliance.quant.gguf.layer_map import read_layer_map as read_gguf_map
from appliance.quant.hf.file import read_bytes
from appliance.quant.hf.layer_map import read_layer_map as read_hf_map
from appliance.quant.hf.module import Layout, Module


@dataclass(frozen=True, slots=True)
class LayerReport:
    """A matrix.

    Attributes:
        name: canonical.
        format: e.g. "Q4_K", "awq-gemm", "bf16".
        detail: bits, groups and act-order of a quantised one, "" for a dense one.
        elements: weights in it.
        nbytes: that they take in the file.
    """

    name: str
    format: str
    detail: str
    elements: int
    nbytes: int

    @property
    def is_dense(self) -> bool:
        return not self.detail


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint.

    Attributes:
        container: "GGUF" or "safetensors".
        architecture: as its metadata name it.
        metadata: the file's, or config.json.
        layers: its matrices.
        vector_bytes: of norms and biases.
        notes: where metadata and tensors disagree, and what is skipped; sentences.
    """

    container: str
    architecture: str
    metadata: Mapping[str, Any]
    layers: tuple[LayerReport, ...]
    vector_bytes: int
    notes: tuple[str, ...]

    @property
    def main_format(self) -> str:
        """What most bytes of quantised matrices are in, of all matrices where none is quantised."""
        layers = [layer for layer in self.layers if not layer.is_dense] or list(self.layers)
        nbytes: dict[str, int] = {}
        for layer in layers:
            nbytes[layer.format] = nbytes.get(layer.format, 0) + layer.nbytes
        return max(nbytes, key=lambda name: nbytes[name])

    @property
    def weight_names(self) -> frozenset[str]:
        return frozenset(layer.name for layer in self.layers)


def report(path: Path) -> Report:
    """Describe a GGUF file or a model folder, and so refuse it where it cannot be read.

    Raises:
        CheckpointError: something in it is corrupt or contradicts itself.
        UnsupportedFormatError: an architecture or a format that is not read.
        OSError: a file cannot be read.
    """
    return _hf(path) if path.is_dir() else _gguf(path)


def _gguf(path: Path) -> Report:
    with GGUFFile(path) as file:
        layers = read_gguf_map(file)
        matrices = {name: slot for name, slot in layers.slots.items() if len(slot.shape) == 2}
        reports = tuple(_gguf_layer(name, layers.tensors[name]) for name in matrices)
        vectors = sum(info.nbytes for name, info in layers.tensors.items() if name not in matrices)
        return Report("GGUF", layers.architecture, layers.metadata, reports, vectors, ())


def _gguf_layer(name: str, info: Any) -> LayerReport:
    kind, elements = info.type, math.prod(info.shape)
    dense = kind.block_size == 1
    detail = (
        ""
        if dense
        else f"{kind.block_bytes * 8 / kind.block_size:g} bits a weight in blocks of {kind.block_size}"
    )
    return LayerReport(name, kind.name.lower() if dense else kind.name, detail, elements, info.nbytes)


def _hf(folder: Path) -> Report:
    layers = read_hf_map(folder)
    reports = tuple(_hf_layer(name, module, layers.layouts[name]) for name, module in layers.modules.items())
    vectors = sum(info.nbytes for info in layers.vectors.values())
    return Report("safetensors", layers.architecture, layers.config, reports, vectors, layers.notes)


def _hf_layer(name: str, module: Module, layout: Layout) -> LayerReport:
    elements = math.prod(module.shape)
    if layout.scheme is None:
        return LayerReport(name, module.tensors["weight"].dtype.lower(), "", elements, module.nbytes)
    groups = layout.scheme.group_size
    size = "one group a row" if groups == module.shape[1] else f"groups of {groups}"
    order = ", act-order" if _is_act_order(module, layout) else ""
    return LayerReport(
        name, layout.format, f"{layout.scheme.bits} bits in {size}{order}", elements, module.nbytes
    )


def _is_act_order(module: Module, layout: Layout) -> bool:
    """Whether inputs are grouped in another order than their own: what the stored groups say, not a flag."""
    for suffix in layout.uses:
        if suffix.endswith("g_idx"):
            info = module.tensors[suffix]
            groups = read_bytes(info).view("<i8" if info.dtype == "I64" else "<i4")
            return bool((np.diff(groups) < 0).any())
    return False
