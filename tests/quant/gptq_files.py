"""GPTQ tensors made one bit at a time, as an oracle for the reader's whole words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from appliance.quant.gptq.layout import V1, V1_WORDS
from appliance.quant.hf.file import read_header
from appliance.quant.hf.module import Module

Tensors = dict[str, torch.Tensor]
WORD = 1 << 32


@dataclass(frozen=True)
class Layer:
    """Codes [N, K] in the order of the inputs, zeros and float16 scales [N, G], the group of each input."""

    bits: int
    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    def weights(self) -> torch.Tensor:
        """(code - zero) * scale in float16, one weight at a time."""
        rows, columns = self.codes.shape
        out = np.zeros((rows, columns), dtype=np.float16)
        for row in range(rows):
            for column, group in enumerate(self.groups):
                steps = np.float16(int(self.codes[row, column]) - int(self.zeros[row, group]))
                out[row, column] = steps * self.scales[row, group] + np.float16(0)
        return torch.from_numpy(out).float()

    def tensors(self, version: str) -> Tensors:
        scales = torch.from_numpy(np.ascontiguousarray(self.scales.T))
        return {
            "qweight": _signed([_words(column, self.bits) for column in self.codes]).t().contiguous(),
            "qzeros": _signed([self._stored_zeros(group, version) for group in self.zeros.T]),
            "scales": scales,
            "g_idx": torch.from_numpy(self.groups.astype(np.int32)),
        }

    def _stored_zeros(self, zeros: np.ndarray, version: str) -> list[int]:
        if version == V1_WORDS and self.bits != 3:
            ones = sum(1 << place for place in range(0, 32, self.bits))
            return [(word - ones) % WORD for word in _words(zeros, self.bits)]
        less = 1 if version in (V1, V1_WORDS) else 0
        return _words((zeros - less) % (1 << self.bits), self.bits)


def make_layer(
    bits: int,
    rows: int,
    columns: int,
    group_size: int,
    order: np.ndarray | None = None,
    zero: int | None = None,
) -> Layer:
    """Random values; every zero point occurs, 0 too, unless all are `zero`."""
    rng = np.random.default_rng([bits, rows, columns, group_size])
    count = -(-columns // group_size)
    zeros = rng.integers(0, 1 << bits, (rows, count)) if zero is None else np.full((rows, count), zero)
    groups = np.arange(columns) // group_size
    if order is not None:
        groups = groups[order]
    scales = rng.uniform(-0.1, 0.1, (rows, count)).astype(np.float16)
    return Layer(bits, rng.integers(0, 1 << bits, (rows, columns)), zeros, scales, groups)


def write_module(
    path: Path, tensors: Tensors, shape: tuple[int, int], name: str = "model.layers.0.x"
) -> Module:
    save_file({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}, path)
    infos = read_header(path).values()
    return Module(name, shape, {info.name.rpartition(".")[2]: info for info in infos})


def _words(values: np.ndarray, bits: int) -> list[int]:
    """A stream of bits, the first value in the lowest."""
    stream = sum(int(value) << (place * bits) for place, value in enumerate(values))
    return [stream >> (32 * word) & (WORD - 1) for word in range(-(-len(values) * bits // 32))]


def _signed(words: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
