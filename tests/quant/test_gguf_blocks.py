"""Block formats against the gguf package's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from appliance.quant.gguf.readers import READERS
from appliance.quant.tensor import QuantTensor

SHAPES = [(1, 32), (3, 64), (7, 96), (64, 576)]
# Where each type's blocks keep their fp16 scales.
HALVES_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
# The gguf package quantises these; the others it only reads.
QUANTISABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return ours.dtype == torch.float32 and ours.numpy().tobytes() == theirs.astype("<f4").tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTISABLE)
def test_dequantisation_is_the_gguf_packages(name: str, shape: tuple[int, int]) -> None:
    kind = gguf.GGMLQuantizationType[name]
    weights = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    weights[:, ::17] *= 40
    raw = gguf.quants.quantize(weights, kind).view(np.uint8).reshape(shape[0], -1)
    raw.flags.writeable = False
    ours = READERS[name](raw).dequantize()
    assert ours.shape == shape
    assert same_bits(ours, gguf.quants.dequantize(raw, kind))


def random_blocks(name: str, rows: int, per_row: int) -> np.ndarray:
    """Any codes, any quantised scales and any finite fp16 ones; of MXFP4's exponents all but NaN."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    draw = np.random.default_rng(2)
    blocks = draw.integers(0, 256, size=(rows, per_row, block_bytes), dtype=np.uint8)
    for at in HALVES_AT[name]:
        halves = draw.normal(size=(rows, per_row)).astype(np.float16)
        halves[0], halves[1], halves[2], halves[3] = 0, 6e-8, 65504, -0.0
        blocks[..., at : at + 2] = halves.view(np.uint8).reshape(rows, per_row, 2)
    if name == "MXFP4":
        blocks[..., 0] = np.arange(rows * per_row).reshape(rows, per_row) % 255
    return blocks.reshape(rows, -1)


def test_every_quantised_type_is_tested() -> None:
    assert set(HALVES_AT) == set(READERS) - {"F32", "F16", "BF16"}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("rows", "per_row"), [(16, 24), (5, 1), (3000, 3)])
@pytest.mark.parametrize("name", HALVES_AT)
def test_every_code_and_every_scale_counts(name: str, rows: int, per_row: int) -> None:
    raw = random_blocks(name, rows, per_row)
    kind = gguf.GGMLQuantizationType[name]
    weight = READERS[name](raw)
    assert same_bits(weight.dequantize(), gguf.quants.dequantize(raw, kind))
    # As packed as in the file, but for scales, of which each takes a byte.
    assert weight.nbytes <= raw.nbytes * 1.2


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", HALVES_AT)
def test_rows_are_selected_without_the_others(name: str) -> None:
    weight, index = READERS[name](random_blocks(name, 9, 2)), torch.tensor([8, 0, 3, 3])
    selected = weight.select_rows(index)
    assert selected.nbytes * 9 == weight.nbytes * 4
    assert same_bits(selected.dequantize(), weight.dequantize()[index].numpy())


def test_a_scale_that_is_not_a_number_makes_weights_that_are_not() -> None:
    block = np.full((1, 17), 0x11, dtype=np.uint8)
    block[0, 0] = 255
    assert READERS["MXFP4"](block).dequantize().isnan().all()


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
