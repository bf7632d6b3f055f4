"""Block formats against the gguf package's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from appliance.quant.gguf.blocks import READERS
from appliance.quant.tensor import QuantTensor

SHAPES = [(1, 32), (3, 64), (7, 96), (64, 576)]


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return ours.dtype == torch.float32 and ours.numpy().tobytes() == theirs.astype("<f4").tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(READERS))
def test_dequantisation_is_the_gguf_packages(name: str, shape: tuple[int, int]) -> None:
    kind = gguf.GGMLQuantizationType[name]
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    weights[:, ::17] *= 40
    raw = gguf.quants.quantize(weights, kind).view(np.uint8).reshape(shape[0], -1)
    raw.flags.writeable = False
    ours = READERS[name](raw).dequantize()
    assert ours.shape == shape
    assert same_bits(ours, gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize(("name", "n_halves"), [("Q4_0", 1), ("Q4_1", 2), ("Q8_0", 1)])
def test_every_code_and_every_scale_counts(name: str, n_halves: int) -> None:
    """Arbitrary code bytes and arbitrary finite scales: negative, subnormal, zero, the largest."""
    kind = gguf.GGMLQuantizationType[name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(2)
    blocks = draw.integers(0, 256, size=(16, 24, block_bytes), dtype=np.uint8)
    halves = draw.normal(size=(16, 24, n_halves)).astype(np.float16)
    halves[0], halves[1], halves[2], halves[3] = 0, 6e-8, 65504, -0.0
    blocks[..., : 2 * n_halves] = halves.view(np.uint8)
    raw = blocks.reshape(16, -1)
    assert same_bits(READERS[name](raw).dequantize(), gguf.quants.dequantize(raw, kind))


def test_codes_are_neighbours_low_nibble_first() -> None:
    block = np.zeros(18, dtype=np.uint8)
    block[:2] = np.array([1], dtype=np.float16).view(np.uint8)
    # Value i is i % 16: ggml's byte j holds values j and j + 16, which are equal.
    block[2:] = np.arange(16, dtype=np.uint8) * 17
    weight = READERS["Q4_0"](block[None])
    assert isinstance(weight, QuantTensor)
    assert weight.codes[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert weight.dequantize()[0].tolist() == [float(i % 16 - 8) for i in range(32)]


def test_the_result_owns_its_memory() -> None:
    raw = np.zeros((2, 8), dtype=np.uint8)
    weight = READERS["F32"](raw)
    raw[:] = 0xFF
    assert weight.dequantize().tolist() == [[0.0, 0.0], [0.0, 0.0]]
