"""A GGUF file as a checkpoint: canonical names, canonical weights, everything checked before data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from appliance.quant.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.file import GGUFFile
from appliance.quant.gguf.layer_map import read_layer_map
from appliance.quant.gguf.readers import READERS
from appliance.quant.tensor import DenseTensor, Weight


class GGUFCheckpoint:
    """An open GGUF model.

    Attributes:
        metadata: every key of the file, and RoPE's factors under the names of their tensors.
        architecture: the file's `general.architecture`.
        eos_token_ids: every token that ends generation, sorted.
        notes: sentences for the log.

    Raises:
        CheckpointError: the file is corrupt, lacks a tensor, or a tensor contradicts the metadata.
        UnsupportedFormatError: an architecture, tensor type or extra tensor that is not read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = GGUFFile(self.path)
        try:
            self._map = read_layer_map(self._file)
        except CheckpointError:
            self._file.close()
            raise
        self.metadata: Mapping[str, Any] = self._map.metadata
        self.architecture = self._map.architecture
        self.eos_token_ids = self._map.eos_token_ids
        self.notes: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """The canonical names of the tensors in this file."""
        return list(self._map.slots)

    def tensor_types(self) -> tuple[str, ...]:
        """The types of the file's tensors, the one that most bytes are of first."""
        nbytes: Counter[str] = Counter()
        for info in self._map.tensors.values():
            nbytes[info.type.name] += info.nbytes
        return tuple(name for name, _ in nbytes.most_common())

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the weight of a canonical name; nothing is read."""
        return self._map.slots[name].shape

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, rows in the model's own order; it shares no memory with the file.

        Raises:
            KeyError: no such name in this file.
            CheckpointError: the file was cut short.
        """
        slot, info = self._map.slots[name], self._map.tensors[name]
        weight = READERS[info.type.name](self._file.data(info))
        if len(slot.shape) == 1:
            weight = _vector(weight)
        if slot.rope_heads and ARCHITECTURES[GGUF_ARCHITECTURES[self.architecture]].gguf_permutes:
            weight = weight.select_rows(_unpermuted(slot.shape[0], slot.rope_heads))
        return weight

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _vector(weight: Weight) -> Weight:
    """One row [1, K] as [K]."""
    assert isinstance(weight, DenseTensor)
    return DenseTensor(weight.data[0])


def _unpermuted(rows: int, heads: int) -> torch.Tensor:
    """Where each row went: the converter interleaves the two halves of a head (0, d/2, 1, d/2 + 1, …)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
