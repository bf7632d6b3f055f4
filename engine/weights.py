"""`ModelWeights`: a checkpoint's weights as the step program names them."""

from __future__ import annotations

import torch

from appliance.quant.gguf.checkpoint import GGUFCheckpoint
from appliance.quant.tensor import QuantizedLinear, Weight


class ModelWeights:
    """Reads weights lazily; each call reads afresh and keeps nothing."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.names = frozenset(checkpoint.names())

    def read(self, name: str) -> Weight:
        return self._checkpoint.read(name)

    def vector(self, name: str) -> torch.Tensor:
        """A norm weight or a bias, float32 [width]."""
        return self._checkpoint.read(name).dequantize()

    def linear(self, names: tuple[str, ...]) -> QuantizedLinear:
        """The named matrices stacked along their rows, with their biases (zeros where only some have one)."""
        parts = tuple(self.read(name) for name in names)
        biases = [
            self.vector(f"{name}.bias") if f"{name}.bias" in self.names else torch.zeros(part.shape[0])
            for name, part in zip(names, parts, strict=True)
        ]
        has_bias = any(f"{name}.bias" in self.names for name in names)
        return QuantizedLinear(parts, torch.cat(biases) if has_bias else None)
