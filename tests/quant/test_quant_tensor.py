"""The canonical weight types: what they compute and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.quant.errors import CheckpointError
from appliance.quant.tensor import DenseTensor, Mode, QuantizedLinear, QuantScheme, QuantTensor, unpack_codes

SYM4 = QuantScheme(4, 32, Mode.SYM)
AFFINE8 = QuantScheme(8, 16, Mode.AFFINE)


def sym4(rows: int = 2, columns: int = 64, **changes: Any) -> QuantTensor:
    parts: dict[str, Any] = {
        "codes": torch.arange(rows * columns // 2, dtype=torch.int32).to(torch.uint8).view(rows, -1),
        "scales": torch.full((rows, columns // 32), 0.5, dtype=torch.float16),
        "biases": None,
        "shape": (rows, columns),
        "scheme": SYM4,
    }
    return QuantTensor(**parts | changes)


def test_symmetric_codes_are_centred() -> None:
    weight = sym4()
    codes = [nibble for byte in range(64) for nibble in (byte % 16, byte // 16)]
    assert weight.dequantize().flatten().tolist() == [(code - 8) * 0.5 for code in codes]
    assert weight.nbytes == 64 + 2 * 2 * 2


def test_affine_codes_have_a_bias_per_group() -> None:
    scales = torch.tensor([[2.0, 0.25]], dtype=torch.float16)
    biases = torch.tensor([[-1.0, 3.0]], dtype=torch.float16)
    codes = torch.arange(240, 272, dtype=torch.int32).clamp(max=255).to(torch.uint8).view(1, 32)
    weight = QuantTensor(codes, scales, biases, (1, 32), AFFINE8).dequantize()[0]
    assert weight[:2].tolist() == [479.0, 481.0]
    assert weight[16:18].tolist() == [66.75, 66.75]


def test_selected_rows_keep_their_metadata() -> None:
    weight = sym4(scales=torch.tensor([[1, 2], [3, 4]], dtype=torch.float16))
    index = torch.tensor([1, 0, 1])
    assert torch.equal(weight.select_rows(index).dequantize(), weight.dequantize()[index])


def test_unpacking_puts_the_low_nibble_first() -> None:
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert unpack_codes(packed, 4).tolist() == [[1, 2, 3, 4]]
    assert unpack_codes(packed, 8).tolist() == [[0x21, 0x43]]


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": torch.zeros(2, 31, dtype=torch.uint8)},
        {"codes": torch.zeros(2, 32, dtype=torch.int8)},
        {"scales": torch.zeros(2, 3, dtype=torch.float16)},
        {"scales": torch.zeros(2, 2)},
        {"biases": torch.zeros(2, 2, dtype=torch.float16)},
        {"scheme": QuantScheme(4, 32, Mode.AFFINE)},
        {"shape": (2, 48)},
        {"shape": (0, 64)},
    ],
)
def test_parts_that_contradict_the_scheme_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        sym4(**changes)


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (16, 32), (4, 8), (4, 20)])
def test_schemes_that_are_not_implemented_are_refused(bits: int, group: int) -> None:
    with pytest.raises(CheckpointError):
        QuantScheme(bits, group, Mode.SYM)


def test_a_linear_layer_stacks_its_parts() -> None:
    dense = DenseTensor(torch.ones(3, 64, dtype=torch.bfloat16))
    layer = QuantizedLinear((sym4(), dense), torch.zeros(5))
    assert (layer.out_features, layer.in_features) == (5, 64)
    assert torch.equal(layer.dequantize(), torch.cat([sym4().dequantize(), torch.ones(3, 64)]))
    assert layer.nbytes == 72 + 3 * 64 * 2 + 5 * 4


@pytest.mark.parametrize(
    ("parts", "bias"),
    [
        ((), None),
        ((sym4(), DenseTensor(torch.ones(3, 32))), None),
        ((DenseTensor(torch.ones(64)),), None),
        ((sym4(),), torch.zeros(3)),
    ],
)
def test_a_linear_layer_of_unlike_parts_is_refused(parts: tuple[Any, ...], bias: Any) -> None:
    with pytest.raises(CheckpointError):
        QuantizedLinear(parts, bias)


def test_a_dense_weight_is_a_float_of_one_or_two_dimensions() -> None:
    with pytest.raises(CheckpointError, match="int64"):
        DenseTensor(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(CheckpointError, match=r"\(1, 1, 1\)"):
        DenseTensor(torch.zeros(1, 1, 1))
