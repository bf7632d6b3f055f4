"""AWQ checkpoints: weights of other tools' files, every order against a plain packer, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from awq_files import Tensors, pack_gemm, pack_gemv, pack_gemv_fast, pack_marlin, write_module

from appliance.quant.awq import layout as awq
from appliance.quant.awq import read as read_awq
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.formats import find_layout
from appliance.quant.hf.module import Advice, Module
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
# Variant, N, K, group size, words of zero points where they are padded.
CASES = [
    (awq.GEMM, 32, 96, 32, 0),
    (awq.GEMM, 8, 1040, 16, 0),
    (awq.GEMM, 40, 100, 20, 0),
    (awq.GEMM, 16, 264, 264, 0),
    (awq.GEMV, 10, 96, 32, 4),
    (awq.GEMV, 7, 1152, 128, 2),
    (awq.GEMV, 3, 320, 64, 2),
    (awq.GEMV, 9, 96, 96, 2),
    (awq.GEMV_FAST, 12, 192, 64, 2),
    (awq.GEMV_FAST, 4, 1152, 128, 2),
    (awq.GEMV_FAST, 8, 64, 32, 4),
    (awq.MARLIN, 128, 96, 32, 0),
    (awq.MARLIN, 64, 48, 48, 0),
    (awq.MARLIN, 192, 64, 64, 0),
]
SMALL = {variant: (n, k, g, w) for variant, n, k, g, w in reversed(CASES)}


@pytest.mark.parametrize("folder", json.loads((GOLDEN / "awq.json").read_text()))
def test_weights_are_what_the_tool_computes(folder: str) -> None:
    expected = json.loads((GOLDEN / "awq.json").read_text())[folder]["sha256"]
    with HFCheckpoint(GOLDEN / folder) as checkpoint:
        assert checkpoint.notes == ()
        for ours, theirs in LINEARS.items():
            weight = checkpoint.read(f"layers.0.{ours}").dequantize().half()
            digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
            assert digest == expected[f"model.layers.0.{theirs}.weight"], ours


def config(variant: str = awq.GEMM, **changes: Any) -> QuantConfig:
    version = variant.removeprefix("awq-").replace("-", "_")
    return replace(QuantConfig("config.json", "awq", 4, None, version), **changes)


def values(rows: int, columns: int, size: int, zero: int | None = None) -> tuple[np.ndarray, ...]:
    """Codes [N, K], zeros [N, G] and scales [N, G]."""
    rng = np.random.default_rng(rows * columns)
    groups = (rows, columns // size)
    zeros = rng.integers(0, 16, groups) if zero is None else np.full(groups, zero)
    scales = rng.uniform(0.001, 0.1, groups).astype(np.float16)
    return rng.integers(0, 16, (rows, columns)), zeros, scales


def pack(variant: str, data: tuple[np.ndarray, ...], width: int) -> Tensors:
    codes, zeros, scales = data
    if variant == awq.MARLIN:
        return pack_marlin(codes, scales)
    if variant == awq.GEMM:
        return pack_gemm(codes, zeros, scales)
    return (pack_gemv if variant == awq.GEMV else pack_gemv_fast)(codes, zeros, scales, width)


def read(
    path: Path, tensors: Tensors, shape: tuple[int, int], claims: QuantConfig
) -> tuple[str, QuantTensor]:
    module = write_module(path / "layer.safetensors", tensors, shape)
    layout = find_layout(module, claims)
    assert sorted(layout.uses) == sorted(tensors)
    weight = read_module(module, layout)
    assert isinstance(weight, QuantTensor)
    return layout.format, weight


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(("variant", "rows", "columns", "size", "width"), CASES)
def test_codes_come_back_from_every_order(
    variant: str,
    rows: int,
    columns: int,
    size: int,
    width: int,
    small: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small:
        monkeypatch.setattr(read_awq, "CHUNK_WORDS", 128)
    codes, zeros, scales = values(rows, columns, size, 8 if variant == awq.MARLIN else None)
    tensors = pack(variant, (codes, zeros, scales), width)
    format_, weight = read(tmp_path, tensors, (rows, columns), config(variant, group_size=size))
    assert format_ == variant
    assert unpack_codes(weight.codes, 4, columns).tolist() == codes.tolist()
    assert (weight.zeros is None) == (variant == awq.MARLIN)
    group = np.arange(columns) // size
    expected = (codes.astype(np.float16) - zeros[:, group].astype(np.float16)) * scales[:, group]
    assert np.array_equal(weight.dequantize().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("variant", [awq.GEMM, awq.GEMV, awq.GEMV_FAST])
def test_zero_points_that_are_all_in_the_middle_are_not_kept(variant: str, tmp_path: Path) -> None:
    rows, columns, size, width = SMALL[variant]
    codes, zeros, scales = values(rows, columns, size, 8)
    claims = config(variant, group_size=size)
    _, weight = read(tmp_path, pack(variant, (codes, zeros, scales), width), (rows, columns), claims)
    assert (weight.scheme.mode, weight.zeros) == (Mode.SYM, None)
    zeros[-1, -1] = 7
    _, weight = read(tmp_path, pack(variant, (codes, zeros, scales), width), (rows, columns), claims)
    assert weight.scheme.mode is Mode.ZP


def headers(
    folder: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]], shape: tuple[int, int]
) -> Module:
    tensors = {suffix: np.zeros(size, dtype) for suffix, (size, dtype) in shapes.items()}
    return write_module(folder / "layer.safetensors", tensors, shape)


I16, I32, F16 = np.dtype(np.int16), np.dtype(np.int32), np.dtype(np.float16)


@pytest.mark.parametrize("claims", [*(config(v) for v in SMALL), config(method="gptq"), QuantConfig()])
def test_no_two_orders_are_mistaken(claims: QuantConfig, tmp_path: Path) -> None:
    """N = K, K / 8, K / 16 and others, where shapes of different orders coincide; whatever is announced."""
    size = 32
    for rows, columns in ((64, 64), (64, 512), (64, 1024), (128, 64), (64, 128), (512, 64), (128, 2048)):
        groups, width = columns // size, -(-columns // size // 32) * 4
        words = {"qweight": ((columns, rows // 8), I32), "qzeros": ((groups, rows // 8), I32)}
        cases = {
            awq.GEMM: words | {"scales": ((groups, rows), F16)},
            awq.GEMV: {
                "qweight": ((rows, columns // 8), I32),
                "qzeros": ((rows, width), I32),
                "scales": ((rows, 8 * width), F16),
            },
            awq.GEMV_FAST: {
                "qweight": ((rows // 4, columns), I16),
                "qzeros": ((8 * width, rows), F16),
                "scales": ((8 * width, rows), F16),
            },
            awq.MARLIN: {"qweight": ((columns // 16, 2 * rows), I32), "scales": ((groups, rows), F16)},
        }
        for variant, shapes in cases.items():
            module = headers(tmp_path, shapes, (rows, columns))
            layout = awq.layout(module, replace(claims, group_size=size))
            assert layout is not None, (variant, rows, columns)
            assert layout.scheme is not None
            assert (layout.format, layout.scheme.group_size) == (variant, size)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_left_to_its_reader(bits: int, tmp_path: Path) -> None:
    for rows, columns in ((64, 64), (64, 512), (64, 1024), (128, 64), (64, 256)):
        groups = columns // 32
        shapes = {
            "qweight": ((columns * bits // 32, rows), I32),
            "qzeros": ((groups, rows * bits // 32), I32),
            "scales": ((groups, rows), F16),
        }
        module = headers(tmp_path, shapes, (rows, columns))
        assert awq.layout(module, config(method="gptq")) is None
        assert awq.layout(module, config(method="auto-round", format="auto_round")) is None
        # Reshaped, AWQ's own words would be GPTQ's of four bits.
        with pytest.raises(CheckpointError, match=r"layer\.qweight"):
            awq.layout(module, config())
        module = headers(tmp_path, shapes | {"g_idx": ((columns,), I32)}, (rows, columns))
        assert awq.layout(module, config()) is None


def test_words_of_autoround_are_not_taken_for_gemm(tmp_path: Path) -> None:
    tensors = pack(awq.GEMM, values(24, 96, 32), 0)
    module = write_module(tmp_path / "layer.safetensors", tensors, (24, 96))
    assert awq.layout(module, config(method="auto-round", format="auto_round")) is None
    assert awq.layout(module, config(method="auto-round", format="auto_round:auto_awq")) is not None


def test_scales_in_bfloat16_are_computed_with_in_float16(tmp_path: Path) -> None:
    data = values(32, 96, 32)
    tensors: dict[str, Any] = pack(awq.GEMM, data, 0)
    tensors["scales"] = torch.from_numpy(tensors["scales"].copy()).bfloat16()
    weight = read(tmp_path, tensors, (32, 96), config())[1]
    assert weight.scales.dtype is torch.float16
    assert weight.scales.tolist() == tensors["scales"].t().tolist()


def test_other_names_of_the_same(tmp_path: Path) -> None:
    data = values(12, 192, 64)
    tensors = pack(awq.GEMV_FAST, data, 2)
    tensors["scaled_zeros"] = tensors.pop("qzeros")
    claims = config(awq.GEMV_FAST, format="llm-awq", group_size=64)
    format_, weight = read(tmp_path, tensors, (12, 192), claims)
    assert format_ == awq.GEMV_FAST
    assert weight.zeros is not None
    assert weight.zeros.tolist() == data[1].tolist()
    tensors = pack(awq.GEMM, values(24, 96, 32), 0)
    assert read(tmp_path, tensors, (24, 96), config(format="exllama"))[0] == awq.GEMM


def broken(tmp_path: Path, variant: str, claims: QuantConfig | None = None, **changes: Any) -> str:
    """The error that a layer makes with tensors replaced, or left out where they are None."""
    rows, columns, size, width = SMALL[variant]
    tensors = pack(variant, values(rows, columns, size), width) | changes
    kept = {suffix: tensor for suffix, tensor in tensors.items() if tensor is not None}
    module = write_module(tmp_path / "layer.safetensors", kept, (rows, columns))
    claims = claims or config(variant, group_size=size)
    with pytest.raises(CheckpointError) as caught:
        read_module(module, find_layout(module, claims))
    return str(caught.value)


@pytest.mark.parametrize("variant", SMALL)
def test_missing_tensors_are_named(variant: str, tmp_path: Path) -> None:
    rows, columns, size, width = SMALL[variant]
    for suffix in pack(variant, values(rows, columns, size), width):
        assert f"tensor 'layer.{suffix}' is missing, expected " in broken(tmp_path, variant, **{suffix: None})


@pytest.mark.parametrize("variant", SMALL)
def test_tensors_of_another_shape_or_type_are_named(variant: str, tmp_path: Path) -> None:
    rows, columns, size, width = SMALL[variant]
    for suffix, tensor in pack(variant, values(rows, columns, size), width).items():
        packed = np.ascontiguousarray(tensor)
        for wrong in (packed[:-1], packed.T, packed.reshape(-1), packed.view(np.uint8), packed[:0]):
            message = broken(tmp_path, variant, **{suffix: wrong})
            assert "tensor 'layer." in message
            assert ", expected " in message


def test_what_the_numbers_contradict(tmp_path: Path) -> None:
    rows, columns, size, width = SMALL[awq.GEMM]
    scales = pack(awq.GEMM, values(rows, columns, size), width)["scales"]
    for bad, reach in ((np.nan, "from nan to nan"), (np.inf, "to inf")):
        broken_scales = np.where(np.arange(rows) == 3, bad, scales).astype(np.float16)
        assert f"{reach}, expected" in broken(tmp_path, awq.GEMM, scales=broken_scales)
    assert "from 0 to 0, expected" in broken(tmp_path, awq.GEMM, scales=np.zeros_like(scales))
    for bad in (1e-9, 1e5):
        beyond = torch.full(scales.shape, 0.5, dtype=torch.bfloat16)
        beyond[-1, -1] = bad
        assert "expected numbers that float16 holds" in broken(tmp_path, awq.GEMM, scales=beyond)
    tensors = pack(awq.GEMV_FAST, values(*SMALL[awq.GEMV_FAST][:3]), SMALL[awq.GEMV_FAST][3])
    mistyped = torch.from_numpy(tensors["qzeros"].copy()).view(torch.bfloat16)
    assert "is BF16 [16, 12], expected F16 [16, 12]" in broken(tmp_path, awq.GEMV_FAST, qzeros=mistyped)
    assert "zero point of -1, expected 0 to 15" in broken(tmp_path, awq.GEMV_FAST, qzeros=tensors["scales"])
    assert "zero point of 16" in broken(tmp_path, awq.GEMV_FAST, qzeros=-16 * tensors["scales"])
    assert "zero point of nan" in broken(tmp_path, awq.GEMV_FAST, qzeros=tensors["qzeros"] * np.nan)


@pytest.mark.parametrize(("variant", "true", "claimed"), [(awq.GEMV, 128, 256), (awq.GEMV_FAST, 256, 128)])
def test_padded_scales_show_a_wrong_group_size(variant: str, true: int, claimed: int, tmp_path: Path) -> None:
    tensors = pack(variant, values(8, 1024, true), 1)
    module = write_module(tmp_path / "layer.safetensors", tensors, (8, 1024))
    layout = find_layout(module, config(variant, group_size=claimed))
    message = f"in {1024 // true} of 8 columns, expected in the first {1024 // claimed} .groups of {claimed}"
    with pytest.raises(CheckpointError, match=message):
        read_module(module, layout)


def test_sizes_that_an_order_cannot_hold(tmp_path: Path) -> None:
    for variant, rows, columns, wanted in (
        (awq.GEMM, 12, 64, "multiples of 8 outputs"),
        (awq.GEMV, 8, 68, "8 inputs"),
        (awq.GEMV_FAST, 8, 96, "4 outputs and 64 inputs"),
        (awq.MARLIN, 32, 64, "64 outputs and 16 inputs"),
    ):
        module = headers(tmp_path, {"qweight": ((8, 8), I32)}, (rows, columns))
        with pytest.raises(CheckpointError, match=f"layer has {rows} outputs.*{wanted}"):
            awq.layout(module, config(variant))
    tensors = pack(awq.GEMM, values(16, 64, 8), 0)
    module = write_module(tmp_path / "layer.safetensors", tensors, (16, 64))
    with pytest.raises(CheckpointError, match="layer: group size 8, expected 16 or more"):
        awq.layout(module, config())


def test_other_widths_are_refused_unless_the_tensors_say_otherwise(tmp_path: Path) -> None:
    claims = config(bits=3)
    module = headers(tmp_path, {"qweight": ((96, 9), I32), "scales": ((3, 24), F16)}, (24, 96))
    with pytest.raises(UnsupportedFormatError, match=r"config\.json: AWQ with 3 bits .* what works: 4 bits"):
        awq.layout(module, claims)
    assert read(tmp_path, pack(awq.GEMM, values(24, 96, 32), 0), (24, 96), claims)[0] == awq.GEMM


def golden(tmp_path: Path, folder: str, **claims: Any) -> Path:
    """A copy of a golden folder whose configuration claims something else."""
    copy = tmp_path / folder
    shutil.copytree(GOLDEN / folder, copy)
    content = json.loads((copy / "config.json").read_text())
    content["quantization_config"] |= claims
    (copy / "config.json").write_text(json.dumps(content))
    return copy


@pytest.mark.parametrize(
    ("claims", "note"),
    [
        ({"group_size": 128}, "is in groups of 128, its tensors say 64"),
        ({"bits": 8}, "is of 8 bits, its tensors say 4 (and 6 others)"),
        (
            {"modules_to_not_convert": ["mlp.down_proj."]},
            "mlp.down_proj is not quantised, its tensors say awq-gemm:",
        ),
        ({"version": "gemv"}, ""),
    ],
)
def test_tensors_decide_and_notes_say_so(claims: dict[str, Any], note: str, tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(golden(tmp_path, "awq_gemm_g64", **claims))
    assert checkpoint.tensor_types() == ("awq-gemm", "dense")
    assert len(checkpoint.notes) == bool(note)
    assert note in "".join(checkpoint.notes)
    with HFCheckpoint(GOLDEN / "awq_gemm_g64") as told:
        expected = told.read("layers.0.down").dequantize()
    assert torch.equal(checkpoint.read("layers.0.down").dequantize(), expected)


def test_what_the_configuration_skips() -> None:
    skipping = config(
        raw={"modules_to_not_convert": ["visual", "mlp.gate.", "model.layers.0."]}, group_size=64
    )
    quantized = Advice(True, 4, 64)
    for module, advice in (
        ("model.layers.0.self_attn.q_proj", Advice(False)),
        ("model.layers.10.self_attn.q_proj", quantized),
        ("model.layers.1.mlp.gate", Advice(False)),
        ("model.layers.1.mlp.gate_proj", quantized),
        ("model.visual.layers.3.fc", Advice(False)),
        ("lm_head", replace(quantized, quantized=None)),
    ):
        assert awq.advise(skipping, module) == advice, module
    with pytest.raises(CheckpointError, match="modules_to_not_convert"):
        awq.check(config(raw={"modules_to_not_convert": "lm_head"}))
