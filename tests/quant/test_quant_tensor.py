"""The canonical weight types: what they compute and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from appliance.quant.errors import CheckpointError
from appliance.quant.packing import pack_codes, packed_bytes, unpack_codes
from appliance.quant.scheme import BITS, Codebook, Mode, QuantScheme
from appliance.quant.tensor import DenseTensor, QuantizedLinear, QuantTensor, stack_rows

SYM4 = QuantScheme(4, 32, Mode.SYM)
AFFINE8 = QuantScheme(8, 16, Mode.AFFINE)
ZP3 = QuantScheme(3, 32, Mode.ZP, "float16")
KQUANT5 = QuantScheme(5, 32, Mode.KQUANT, super_size=256)


def sym4(rows: int = 2, columns: int = 64, **changes: Any) -> QuantTensor:
    parts: dict[str, Any] = {
        "codes": torch.arange(rows * columns // 2, dtype=torch.int32).to(torch.uint8).view(rows, -1),
        "scales": torch.full((rows, columns // 32), 0.5, dtype=torch.float16),
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
    weight = QuantTensor(codes, scales, (1, 32), AFFINE8, biases=biases).dequantize()[0]
    assert weight[:2].tolist() == [479.0, 481.0]
    assert weight[16:18].tolist() == [66.75, 66.75]


def test_selected_rows_keep_their_metadata() -> None:
    weight = sym4(scales=torch.tensor([[1, 2], [3, 4]], dtype=torch.float16))
    index = torch.tensor([1, 0, 1])
    assert torch.equal(weight.select_rows(index).dequantize(), weight.dequantize()[index])


def test_zero_points_and_rounding_are_those_of_the_tool() -> None:
    codes = torch.randint(0, 8, (5, 40), dtype=torch.uint8)
    scales = torch.rand(5, 2).half()
    zeros = torch.randint(0, 9, (5, 2), dtype=torch.uint8)
    weight = QuantTensor(pack_codes(codes, 3), scales, (5, 40), ZP3, zeros=zeros)
    group = torch.arange(40) // 32
    expected = (codes.half() - zeros[:, group].half()) * scales[:, group]
    assert expected.dtype is torch.float16
    assert torch.equal(weight.dequantize(), expected.float())


def test_quantised_scales_and_biases_multiply_those_of_the_super_block() -> None:
    codes = torch.randint(0, 32, (2, 512), dtype=torch.uint8)
    scales, biases = torch.rand(2, 2).half(), -torch.rand(2, 2).half()
    sub_scales = torch.randint(0, 64, (2, 16), dtype=torch.int8)
    sub_biases = torch.randint(0, 64, (2, 16), dtype=torch.int8)
    weight = QuantTensor(
        pack_codes(codes, 5),
        scales,
        (2, 512),
        KQUANT5,
        biases=biases,
        sub_scales=sub_scales,
        sub_biases=sub_biases,
    )
    for row, column in ((0, 0), (0, 33), (1, 255), (1, 256), (1, 511)):
        group, block = column // 32, column // 256
        scale = scales[row, block].float() * sub_scales[row, group]
        bias = biases[row, block].float() * sub_biases[row, group]
        assert weight.dequantize()[row, column] == codes[row, column] * scale + bias


def test_a_code_book_is_looked_up() -> None:
    scheme = QuantScheme(8, 16, Mode.CODEBOOK, codebook=Codebook.E4M3)
    codes = torch.tensor([*range(0x7F), *range(0x80, 0xFF), 0, 0], dtype=torch.uint8).view(1, 256)
    scales = torch.full((1, 16), 2.0)
    assert torch.equal(
        QuantTensor(codes, scales, (1, 256), scheme).dequantize(), codes.view(torch.float8_e4m3fn).float() * 2
    )


def test_permuted_columns_return_to_their_inputs() -> None:
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    order = torch.randperm(64)
    plain = sym4(rows=3, codes=pack_codes(codes, 4))
    permuted = sym4(rows=3, codes=pack_codes(codes, 4), permutation=order)
    assert torch.equal(permuted.dequantize()[:, order], plain.dequantize())
    assert permuted.nbytes == plain.nbytes + 64 * 8


def test_like_weights_stack_and_unlike_ones_do_not() -> None:
    order = torch.randperm(64)
    first, second = sym4(permutation=order), sym4(rows=3, permutation=order.clone())
    both = stack_rows((first, second))
    assert torch.equal(both.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))
    for other in (
        sym4(),
        sym4(permutation=order.flip(0)),
        sym4(columns=96),
        sym4(scales=torch.ones(2, 2, dtype=torch.bfloat16), permutation=order),
        sym4(scheme=QuantScheme(4, 32, Mode.SYM, "float16"), permutation=order),
        DenseTensor(torch.ones(2, 64)),
    ):
        assert not first.stacks_with(other)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 7, 8, 40, 333])
def test_packing_is_a_stream_of_bits_and_loses_nothing(bits: int, columns: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, columns), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, packed_bytes(columns, bits))
    assert torch.equal(unpack_codes(packed, bits, columns), codes)
    stream = sum(int(code) << (bits * place) for place, code in enumerate(codes[1]))
    assert int.from_bytes(packed[1].numpy().tobytes(), "little") == stream


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": torch.zeros(2, 31, dtype=torch.uint8)},
        {"codes": torch.zeros(2, 32, dtype=torch.int8)},
        {"scales": torch.zeros(2, 3, dtype=torch.float16)},
        {"scales": torch.zeros(2, 2, dtype=torch.int32)},
        {"zeros": torch.zeros(2, 2, dtype=torch.uint8)},
        {"sub_scales": torch.zeros(2, 2, dtype=torch.int8)},
        {"permutation": torch.arange(63)},
        {"biases": torch.zeros(2, 2, dtype=torch.float16)},
        {"scheme": QuantScheme(4, 32, Mode.AFFINE)},
        {"scheme": QuantScheme(4, 32, Mode.ZP)},
        {"shape": (2, 48)},
        {"shape": (0, 64)},
    ],
)
def test_parts_that_contradict_the_scheme_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        sym4(**changes)


@pytest.mark.parametrize(("bits", "group"), [(7, 32), (16, 32), (4, 8)])
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
