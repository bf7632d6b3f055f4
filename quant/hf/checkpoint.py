"""A model folder as a checkpoint: canonical names, canonical weights, everything checked before data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from appliance.quant.architectures import ARCHITECTURES
from appliance.quant.errors import located
from appliance.quant.hf.layer_map import LayerMap, read_layer_map
from appliance.quant.hf.readers import read_module, read_tensor
from appliance.quant.tensor import DenseTensor, Weight


class HFCheckpoint:
    """A model in a folder of safetensors.

    Attributes:
        metadata: config.json.
        architecture: as transformers names it.
        eos_token_ids: every token that ends generation, sorted.
        notes: where configuration and tensors disagree, and what was skipped; sentences for the log.

    Raises:
        CheckpointError: a file is corrupt, a tensor is missing, too many, or contradicts the configuration.
        UnsupportedFormatError: an architecture or a format that is not read.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._map: LayerMap = read_layer_map(self.path)
        self.metadata: Mapping[str, Any] = self._map.config
        self.architecture = self._map.architecture
        self.eos_token_ids = self._map.eos_token_ids
        self.notes = self._map.notes

    def names(self) -> list[str]:
        """The canonical names of the weights in this folder."""
        return [*self._map.vectors, *self._map.modules]

    def tensor_types(self) -> tuple[str, ...]:
        """The formats of the layers, the one that most bytes are of first."""
        nbytes: Counter[str] = Counter()
        for name, module in self._map.modules.items():
            nbytes[self._map.layouts[name].format] += module.nbytes
        return tuple(format_ for format_, _ in nbytes.most_common())

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the weight of a canonical name; nothing is read."""
        return self._map.vectors[name].shape if name in self._map.vectors else self._map.modules[name].shape

    def read(self, name: str) -> Weight:
        """The weight of a canonical name.

        Raises:
            KeyError: no such name in this folder.
            CheckpointError: its data contradict themselves, or a file was cut short.
        """
        if name in self._map.vectors:
            return self._vector(name)
        module = self._map.modules[name]
        with located(f"{module.file}: {module.name}"):
            return read_module(module, self._map.layouts[name])

    def _vector(self, name: str) -> DenseTensor:
        stored = read_tensor(self._map.vectors[name])
        offset = ARCHITECTURES[self.architecture].norm_offset
        return DenseTensor(stored.float() + offset if offset and name.endswith("norm") else stored)

    def close(self) -> None:
        """Nothing is kept open."""

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
