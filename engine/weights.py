"""`ModelWeights`: a checkpoint's weights as the step program names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from appliance.quant.checkpoint import Checkpoint
from appliance.quant.errors import CheckpointError
from appliance.quant.tensor import QuantizedLinear, Weight, stack_rows

Progress = Callable[[int, int], None]
"""Told how many weights of how many are read."""


class ModelWeights:
    """Reads weights lazily; each call reads afresh and keeps nothing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names = frozenset(checkpoint.names())

    def elements(self, names: tuple[str, ...]) -> int:
        """How many weights the named matrices have together; nothing is read."""
        return sum(math.prod(self._checkpoint.shape(name)) for name in names)

    def read(self, name: str) -> Weight:
        """Raises CheckpointError where a weight is not a finite number."""
        weight = self._checkpoint.read(name)
        if not weight.is_finite():
            raise CheckpointError(
                f"{self._checkpoint.path}: the weight {name} holds values that are not finite numbers; "
                "fetch the model again"
            )
        return weight

    def vector(self, name: str) -> torch.Tensor:
        """A norm weight or a bias, float32 [width]."""
        return self.read(name).dequantize()

    def linear(self, names: tuple[str, ...]) -> QuantizedLinear:
        """The named matrices stacked along their rows, with their biases (zeros where only some have one).

        Neighbours of one scheme and permutation become one matrix; unlike ones stay parts of their own.
        """
        weights = [self.read(name) for name in names]
        return QuantizedLinear(tuple(_fused(weights)), self.bias(names))

    def bias(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """The biases of the named matrices one after the other, zeros where only some have one; None without any."""
        found = [self.vector(f"{name}.bias") if f"{name}.bias" in self.names else None for name in names]
        if not any(bias is not None and bool(bias.any()) for bias in found):
            return None
        shapes = (self._checkpoint.shape(name) for name in names)
        return torch.cat(
            [
                torch.zeros(shape[0]) if bias is None else bias
                for bias, shape in zip(found, shapes, strict=True)
            ]
        )


def read_layers(
    weights: ModelWeights, layers: Sequence[tuple[str, ...]], progress: Progress
) -> Iterator[tuple[tuple[str, ...], QuantizedLinear]]:
    """`weights.linear` of each, in order; as many are read at once, and held, as torch has threads.

    Each in one thread: where most of the work is moving bytes, the parts of an operation wait for each other longer
    than they take.
    """
    total = sum(weights.elements(names) for names in layers)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    try:
        done = 0
        for first in range(0, len(layers), threads):
            some = layers[first : first + threads]
            for names, layer in zip(some, pool.map(weights.linear, some), strict=True):
                done += weights.elements(names)
                progress(done, total)
                yield names, layer
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _fused(weights: Sequence[Weight]) -> Iterator[Weight]:
    """The weights in order, neighbours that stack as one."""
    run = [weights[0]]
    for weight in weights[1:]:
        if run[0].stacks_with(weight):
            run.append(weight)
        else:
            yield stack_rows(run)
            run = [weight]
    yield stack_rows(run)
