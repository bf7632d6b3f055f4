"""compressed-tensors checkpoints: weights of other tools' files, every layout against a plain packer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_files import Tensors, config, module, padded, stream

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.formats import find_layout
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.hf.readers import read_module
from appliance.quant.packing import unpack_codes
from appliance.quant.scheme import Mode
from appliance.quant.tensor import QuantTensor

GOLDEN = Path(__file__).parents[1] / "golden"
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Bits, N, K, group size, where codes may not cross words, zero points, whether groups are scattered, scales.
PACKED = [
    (4, 13, 96, 32, False, "packed", False, torch.float16),
    (4, 7, 130, 26, False, None, False, torch.bfloat16),
    (4, 9, 64, 16, False, "plain", True, torch.float32),
    (2, 21, 80, 16, False, "packed", True, torch.bfloat16),
    (3, 11, 96, 24, False, "packed", False, torch.float16),
    (3, 35, 256, 64, True, "packed", True, torch.float16),
    (5, 14, 160, 80, False, "packed", True, torch.float16),
    (5, 9, 100, 100, True, None, False, torch.float32),
    (6, 10, 170, 17, True, "packed", False, torch.bfloat16),
    (6, 6, 64, 64, False, "plain", False, torch.float16),
    (8, 5, 66, 33, False, "packed", True, torch.float16),
]


@pytest.mark.parametrize("folder", json.loads((GOLDEN / "compressed.json").read_text()))
def test_weights_are_what_the_tool_computes(folder: str) -> None:
    expected = json.loads((GOLDEN / "compressed.json").read_text())[folder]["sha256"]
    with HFCheckpoint(GOLDEN / folder) as checkpoint:
        assert checkpoint.tensor_types()[0].startswith("compressed-tensors-")
        for ours, theirs in LINEARS.items():
            weight = checkpoint.read(f"layers.0.{ours}").dequantize()
            found = hashlib.sha256(weight.half().numpy().tobytes()).hexdigest()
            assert found == expected[f"model.layers.0.{theirs}.weight"], ours
        notes = checkpoint.notes
    told = ("config.json asks for quantised activations: only the weights are quantised here",)
    assert notes == (told if folder in ("ct_fp8_dynamic", "ct_w8a8_int8") else ())


def read(folder: Path, tensors: Tensors, shape: tuple[int, int], quant: QuantConfig) -> QuantTensor:
    layer = module(folder, tensors, shape)
    weight = read_module(layer, find_layout(layer, quant))
    assert isinstance(weight, QuantTensor)
    return weight


@pytest.mark.parametrize("case", PACKED)
def test_packed_codes_come_back(tmp_path: Path, case: tuple) -> None:  # type: ignore[type-arg]
    bits, rows, columns, size, is_padded, zero_kind, is_scattered, dtype = case
    pack = padded if is_padded else stream
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    groups = torch.arange(columns) // size
    groups = groups[torch.randperm(columns)] if is_scattered else groups
    scales = torch.randn(rows, columns // size).to(dtype)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8)
    tensors = {"weight_packed": pack(codes, bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if zero_kind:
        is_packed = zero_kind == "packed"
        tensors["weight_zero_point"] = (
            pack(zeros.T, bits).T if is_packed else (zeros.int() - (1 << bits - 1)).char()
        )
    else:
        zeros.fill_(1 << bits - 1)
    if is_scattered:
        tensors["weight_g_idx"] = groups.int()
    weight = read(
        tmp_path, tensors, (rows, columns), config(num_bits=bits, group_size=size, symmetric=not zero_kind)
    )
    assert (weight.scheme.bits, weight.scheme.group_size) == (bits, size)
    assert weight.scheme.mode is (Mode.ZP if zero_kind else Mode.SYM)
    assert weight.codes.numel() == rows * -(-columns * bits // 8)
    order = torch.arange(columns) if weight.permutation is None else weight.permutation
    assert (weight.permutation is not None) == is_scattered
    assert torch.equal(unpack_codes(weight.codes, bits, columns), codes[:, order])
    # In the dtype of the scales, as the tool does.
    expected = (codes.to(dtype) - zeros[:, groups].to(dtype)) * scales[:, groups]
    assert torch.equal(weight.dequantize(), expected.float())


@pytest.mark.parametrize("claim", [None, 2, 8])
def test_bits_are_those_of_the_packed_lengths_whatever_is_claimed(tmp_path: Path, claim: int | None) -> None:
    codes, zeros = torch.randint(0, 32, (6, 96), dtype=torch.uint8), torch.full((6, 1), 16, dtype=torch.uint8)
    tensors = {"weight_packed": stream(codes, 5), "weight_scale": torch.ones(6, 1).half()}
    tensors["weight_shape"] = torch.tensor([6, 96], dtype=torch.int32)
    if claim:
        tensors["weight_zero_point"] = stream(zeros.T, 5).T
    quant = config(num_bits=claim, strategy="channel") if claim else QuantConfig()
    weight = read(tmp_path, tensors, (6, 96), quant)
    assert torch.equal(weight.dequantize(), codes.float() - 16)


def test_a_length_that_two_packings_have_is_refused(tmp_path: Path) -> None:
    codes = torch.zeros(2, 40, dtype=torch.uint8)
    assert stream(codes, 3).shape == padded(codes, 3).shape
    tensors = {"weight_packed": stream(codes, 3), "weight_scale": torch.ones(2, 1).half()}
    tensors["weight_shape"] = torch.tensor([2, 40])
    with pytest.raises(UnsupportedFormatError, match="40 codes of 3 bits in 4 words"):
        read(tmp_path, tensors, (2, 40), config(num_bits=3, strategy="channel"))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_one_code_a_byte_is_kept_in_as_many_bits_as_it_has(tmp_path: Path, bits: int) -> None:
    half = 1 << (bits - 1)
    signed = torch.randint(-half, half, (5, 66), dtype=torch.int8)
    signed[0, :2] = torch.tensor([-half, half - 1])
    zeros, scales = torch.randint(-half, half, (5, 3), dtype=torch.int8), torch.randn(5, 3).bfloat16()
    tensors = {"weight": signed, "weight_scale": scales, "weight_zero_point": zeros}
    weight = read(tmp_path, tensors, (5, 66), config(num_bits=bits, group_size=22, symmetric=False))
    assert weight.codes.shape == (5, -(-66 * bits // 8))
    group = torch.arange(66) // 22
    expected = (signed.bfloat16() - zeros.bfloat16()[:, group]) * scales[:, group]
    assert torch.equal(weight.dequantize(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_fp8_has_a_scale_for_whatever_shares_it(tmp_path: Path, strategy: str, dtype: torch.dtype) -> None:
    rows, columns = 70, 96
    codes = (
        torch.randint(0, 127, (rows, columns), dtype=torch.uint8)
        | torch.randint(0, 2, (rows, columns)).byte() << 7
    )
    values = codes.view(torch.float8_e4m3fn)
    height, width = {"tensor": (70, 96), "channel": (1, 96), "group": (1, 32), "block": (32, 40)}[strategy]
    shape = (1,) if strategy == "tensor" else (-(-rows // height), -(-columns // width))
    scales = torch.randn(shape).to(dtype)
    extra = (
        {"group_size": 32}
        if strategy == "group"
        else {"block_structure": [32, 40]}
        if strategy == "block"
        else {}
    )
    quant = config(num_bits=8, type="float", strategy=strategy, **extra)
    tensors = {"weight": values, "weight_scale": scales, "input_scale": torch.ones(1)}
    weight = read(tmp_path, tensors, (rows, columns), quant)
    assert weight.codes.nbytes == rows * columns
    full = scales.view(-1, scales.shape[-1]).repeat_interleave(height, 0).repeat_interleave(width, 1)
    expected = values.to(dtype) * full[:rows, :columns]
    assert torch.equal(weight.dequantize(), expected.float())


def packed_layer(**changes: torch.Tensor | None) -> Tensors:
    """4 bits, 6 rows, 64 columns in 4 scattered groups; None leaves a tensor out."""
    tensors = {
        "weight_packed": torch.zeros(6, 8, dtype=torch.int32),
        "weight_scale": torch.ones(6, 4).half(),
        "weight_shape": torch.tensor([6, 64]),
        "weight_zero_point": torch.zeros(1, 4, dtype=torch.int32),
        "weight_g_idx": torch.arange(64).int() % 4,
    }
    return {name: t for name, t in (tensors | changes).items() if t is not None}


ODD = torch.arange(64).int() % 4
BAD = [
    ({"weight_scale": None}, r"weight_scale' is missing, expected F32 or F16 or BF16 \[6, 4\]"),
    ({"weight_shape": None}, r"weight_shape' is missing, expected I64 or I32 \[2\]"),
    ({"weight_zero_point": None}, r"weight_zero_point' is missing, expected I32 \[1, 4\]"),
    ({"weight_g_idx": None}, r"weight_g_idx' is missing, expected I32 or I64 \[64\]"),
    ({"weight_packed": torch.zeros(6, 9).int()}, r"weight_packed' is I32 \[6, 9\], expected I32 \[6, 8\]"),
    ({"weight_packed": torch.zeros(8, 6).int()}, r"weight_packed' is I32 \[8, 6\], expected I32 \[6, 6\]"),
    ({"weight_packed": torch.zeros(6, 32).byte()}, r"weight_packed' is U8 \[6, 32\], expected I32"),
    (
        {"weight_scale": torch.ones(4, 6)},
        r"weight_scale' is F32 \[4, 6\], expected F32 or F16 or BF16 \[6, 4\]",
    ),
    ({"weight_scale": torch.ones(6, 4).int()}, r"weight_scale' is I32 \[6, 4\], expected F32"),
    (
        {"weight_scale": torch.ones(6, 5)},
        r"weight_scale' is F32 \[6, 5\], expected F32 or F16 or BF16 \[6, 4\]",
    ),
    ({"weight_scale": torch.full((6, 4), torch.nan)}, "weight_scale holds NaN or infinity"),
    ({"weight_shape": torch.tensor([6, 60])}, r"weight_shape holds \[6, 60\], expected \[6, 64\]"),
    (
        {"weight_zero_point": torch.zeros(4, 1).int()},
        r"weight_zero_point' is I32 \[4, 1\], expected I32 \[1, 4\]",
    ),
    ({"weight_g_idx": ODD[:63]}, r"weight_g_idx' is I32 \[63\], expected I32 or I64 \[64\]"),
    ({"weight_g_idx": ODD + 1}, "weight_g_idx holds 1 to 4, expected 0 to 3"),
    ({"weight_g_idx": ODD - 1}, "weight_g_idx holds -1 to 2, expected 0 to 3"),
    ({"weight_g_idx": ODD.clamp(max=2)}, "weight_g_idx has 32 columns in group 2, expected 16 in each"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_tensors_at_odds_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    quant = config(num_bits=4, group_size=16, symmetric=False, actorder="group")
    read(tmp_path, packed_layer(), (6, 64), quant)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, packed_layer(**changes), (6, 64), quant)


def test_groups_that_do_not_divide_a_row_are_refused(tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(3, 96, dtype=torch.int8), "weight_scale": torch.ones(3, 2)}
    with pytest.raises(CheckpointError, match=r"groups of 64 do not divide the 96 columns of model\.layers"):
        read(tmp_path, tensors, (3, 96), config(num_bits=8, group_size=64))


# A row of 64 codes in 4 bits, with nothing but a claim beside it.
ALONE = {
    "weight_packed": torch.zeros(6, 8).int(),
    "weight_scale": torch.ones(6, 4),
    "weight_shape": torch.tensor([6, 64]),
}


@pytest.mark.parametrize(
    ("tensors", "claims", "message"),
    [
        (ALONE, {"num_bits": 8}, r"weight_packed' is I32 \[6, 8\], expected I32 \[6, 16\]"),
        (ALONE, {"group_size": 32}, r"weight_scale' is F32 \[6, 4\], expected .* \[6, 2\]"),
        (
            ALONE,
            {"group_size": None, "strategy": "channel"},
            r"weight_scale' is F32 \[6, 4\], expected .* \[6, 1\]",
        ),
        (ALONE | {"weight_scale": torch.ones(1)}, {}, r"weight_scale' is F32 \[1\], expected .* \[6, 4\]"),
        (
            {"weight": torch.zeros(6, 64).char()},
            {"num_bits": 8, "type": "float"},
            r"is I8 \[6, 64\], expected F8_E4M3",
        ),
        (
            {"weight": torch.zeros(6, 64).to(torch.float8_e4m3fn)},
            {},
            r"is F8_E4M3 \[6, 64\], expected I8 \[6, 64\]",
        ),
    ],
)
def test_one_tensor_against_the_claim_is_an_error(
    tmp_path: Path, tensors: Tensors, claims: dict[str, Any], message: str
) -> None:
    quant = config(**{"num_bits": 4, "group_size": 16} | claims)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, tensors, (6, 64), quant)


def test_groups_that_were_never_scattered_keep_the_order(tmp_path: Path) -> None:
    unset = packed_layer(weight_g_idx=torch.full((64,), -1).int())
    assert read(tmp_path, unset, (6, 64), config(num_bits=4, group_size=16)).permutation is None


def test_a_byte_outside_the_claimed_bits_is_an_error(tmp_path: Path) -> None:
    signed = torch.zeros(3, 64, dtype=torch.int8)
    signed[2, 5] = 4
    tensors = {"weight": signed, "weight_scale": torch.ones(3, 1)}
    with pytest.raises(
        CheckpointError, match="weight holds 0 to 4, expected -4 to 3 as the configuration says 3 bits"
    ):
        read(tmp_path, tensors, (3, 64), config(num_bits=3, strategy="channel"))
    assert read(tmp_path, tensors, (3, 64), QuantConfig()).scheme.bits == 8


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_fp8_that_is_no_number_is_an_error(tmp_path: Path, byte: int) -> None:
    codes = torch.zeros(3, 64, dtype=torch.uint8)
    codes[2, 63] = byte
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="weight holds NaN"):
        read(tmp_path, tensors, (3, 64), config(num_bits=8, type="float", strategy="tensor"))
