"""GPTQ checkpoints: weights of other tools' files, every version against a plain packer, and what is refused."""

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
from gptq_files import Layer, Tensors, make_layer, write_module

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gptq import layout as gptq
from appliance.quant.gptq.layout import V1, V1_WORDS, V2
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.formats import announced, find_layout
from appliance.quant.hf.module import Advice
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.hf.readers import read_module
from appliance.quant.packing import packed_bytes, unpack_codes
from appliance.quant.scheme import Mode
from appliance.quant.tensor import QuantTensor

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "gptq.json").read_text())
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@pytest.mark.parametrize("folder", EXPECTED)
def test_weights_are_what_the_tool_computes(folder: str) -> None:
    with HFCheckpoint(GOLDEN / folder) as checkpoint:
        assert checkpoint.notes == ()
        for ours, theirs in LINEARS.items():
            weight = checkpoint.read(f"layers.0.{ours}")
            assert isinstance(weight, QuantTensor)
            assert (weight.permutation is not None) == (folder.endswith("_sym_desc"))
            assert (weight.zeros is None) == ("_sym" in folder)
            digest = hashlib.sha256(weight.dequantize().half().numpy().tobytes()).hexdigest()
            assert digest == EXPECTED[folder]["sha256"][f"model.layers.0.{theirs}.weight"], ours


def config(version: str = V1, **changes: Any) -> QuantConfig:
    raw: dict[str, Any] = {"sym": False}
    if version == V1_WORDS:
        raw["meta"] = {"quantizer": ["gptqmodel:7.7.0"]}
    raw |= changes.pop("raw", {})
    return replace(
        QuantConfig("config.json", "gptq", format="gptq_v2" if version == V2 else "", raw=raw), **changes
    )


def load(tmp_path: Path, layer: Layer, quant: QuantConfig, **changes: torch.Tensor | None) -> QuantTensor:
    version = V2 if quant.format == "gptq_v2" else V1_WORDS if "meta" in quant.raw else V1
    tensors = {**layer.tensors(version), **changes}
    module = write_module(
        tmp_path / "x.safetensors", {k: v for k, v in tensors.items() if v is not None}, layer.codes.shape
    )
    weight = read_module(module, find_layout(module, quant))
    assert isinstance(weight, QuantTensor)
    return weight


def shuffled(columns: int) -> np.ndarray:
    return np.random.default_rng(columns).permutation(columns)


@pytest.mark.parametrize("version", [V1, V1_WORDS, V2])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("bits", "rows", "columns", "group_size"),
    [
        (2, 48, 96, 32),
        (3, 64, 160, 32),
        (4, 24, 96, 16),
        (4, 16, 264, 264),
        (8, 12, 64, 32),
        (4, 7, 100, 20),
        (2, 5, 72, 36),
        (3, 11, 70, 35),
        # The last group is short.
        (4, 24, 200, 64),
        (8, 8, 96, 64),
    ],
)
def test_every_version_and_width(
    tmp_path: Path, version: str, ordered: bool, bits: int, rows: int, columns: int, group_size: int
) -> None:
    layer = make_layer(bits, rows, columns, group_size, shuffled(columns) if ordered else None)
    weight = load(tmp_path, layer, config(version, bits=bits, group_size=group_size))
    assert weight.codes.shape == (rows, packed_bytes(columns, bits))
    assert (weight.scheme.bits, weight.scheme.group_size, weight.scheme.mode) == (bits, group_size, Mode.ZP)
    codes = unpack_codes(weight.codes, bits, columns).numpy()
    order = np.arange(columns) if weight.permutation is None else weight.permutation.numpy()
    assert (codes == layer.codes[:, order]).all()
    assert weight.zeros is not None
    assert (weight.zeros.numpy() == layer.zeros).all()
    found, expected = weight.dequantize(), layer.weights()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_groups_out_of_order_are_contiguous_in_memory(tmp_path: Path) -> None:
    layer = make_layer(4, 8, 64, 16, shuffled(64))
    weight = load(tmp_path, layer, config())
    assert weight.permutation is not None
    assert layer.groups[weight.permutation.numpy()].tolist() == [
        group for group in range(4) for _ in range(16)
    ]


def test_borrows_of_whole_words_are_undone(tmp_path: Path) -> None:
    """Zero points of 0 make the two versions differ: each is wrong for the other's files."""
    layer = make_layer(2, 32, 32, 32)
    assert (layer.zeros == 0).any()
    by_words = config(V1_WORDS)
    misread = load(tmp_path, layer, by_words, qzeros=layer.tensors(V1)["qzeros"])
    assert misread.zeros is not None
    assert not (misread.zeros.numpy() == layer.zeros).all()
    qzeros = layer.tensors(V1_WORDS)["qzeros"]
    for raw in ({"meta": {"quantizer": "gptqmodel:0.9.0"}}, {"checkpoint_format": "gptq"}):
        weight = load(tmp_path, layer, config(raw=raw), qzeros=qzeros)
        assert weight.zeros is not None
        assert (weight.zeros.numpy() == layer.zeros).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [V1, V1_WORDS, V2])
def test_symmetric_layers_keep_no_zero_points(tmp_path: Path, version: str, bits: int) -> None:
    layer = make_layer(bits, 32, 96, 32, zero=1 << (bits - 1))
    for symmetric in (False, True):
        weight = load(tmp_path, layer, config(version, raw={"sym": symmetric}))
        assert (weight.scheme.mode, weight.zeros) == (Mode.SYM, None)
        assert torch.equal(weight.dequantize(), layer.weights())


@pytest.mark.parametrize(("said", "stored"), [(V1, V2), (V1_WORDS, V2), (V2, V1)])
def test_zero_points_of_a_symmetric_layer_tell_the_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, stored: str
) -> None:
    layer = make_layer(4, 32, 96, 32, zero=8)
    qzeros = layer.tensors(stored)["qzeros"]
    weight = load(tmp_path, layer, config(said, raw={"sym": True}), qzeros=qzeros)
    assert torch.equal(weight.dequantize(), layer.weights())
    assert f"x stores its zero points as {8 if stored == V2 else 7}, not as {said} does" in caplog.text
    weight = load(tmp_path, layer, config(said, raw={"sym": False}), qzeros=qzeros)
    assert weight.zeros is not None
    assert weight.zeros.unique().tolist() == [9 if stored == V2 else 7]


def test_different_zero_points_overrule_symmetry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(4, 32, 96, 32)
    weight = load(tmp_path, layer, config(raw={"sym": True}))
    assert weight.scheme.mode is Mode.ZP
    assert torch.equal(weight.dequantize(), layer.weights())
    assert "said to be symmetric, but its zero points differ" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_other_types_are_rounded_to_float16(tmp_path: Path, dtype: torch.dtype) -> None:
    layer = make_layer(4, 16, 64, 32)
    scales = layer.tensors(V1)["scales"].to(dtype)
    weight = load(tmp_path, layer, config(), scales=scales)
    assert torch.equal(weight.scales, scales.t().half())


def test_the_order_of_inputs_tells_the_group_size(tmp_path: Path) -> None:
    """Two groups of 96 inputs are of 48, or of 64 and 32."""
    layer = make_layer(4, 8, 96, 48, shuffled(96))
    weight = load(tmp_path, layer, config(group_size=64))
    assert weight.scheme.group_size == 48
    assert torch.equal(weight.dequantize(), layer.weights())
    with pytest.raises(
        CheckpointError, match=r"2 groups of 96 inputs in model.layers.0.x are of 48, or of 64"
    ):
        load(tmp_path, layer, config(group_size=64, raw={"desc_act": False}), g_idx=None)


def test_a_layer_without_an_order_needs_a_configuration_that_says_so(tmp_path: Path) -> None:
    layer = make_layer(4, 8, 96, 32)
    weight = load(tmp_path, layer, config(raw={"desc_act": False}), g_idx=None)
    assert torch.equal(weight.dequantize(), layer.weights())
    with pytest.raises(
        CheckpointError, match=r"'model.layers.0.x.g_idx' is missing, expected I32 or I64 \[96\]"
    ):
        load(tmp_path, layer, config(), g_idx=None)


def order(changes: dict[int, int]) -> torch.Tensor:
    groups = torch.arange(96, dtype=torch.int32) // 32
    for place, group in changes.items():
        groups[place] = group
    return groups


def scale(value: float) -> torch.Tensor:
    scales = torch.ones(3, 24, dtype=torch.float32)
    scales[1, 5] = value
    return scales


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"g_idx": order({5: 3})}, "tensor 'g_idx' holds 3, expected groups below 3"),
        ({"g_idx": order({5: -1})}, "tensor 'g_idx' holds -1, expected groups below 3"),
        ({"g_idx": order({5: 1})}, "tensor 'g_idx' puts 31 of 96 inputs into group 0, expected 32"),
        ({"g_idx": order({70: 1})}, "tensor 'g_idx' puts 33 of 96 inputs into group 1, expected 32"),
        ({"g_idx": order({0: 0})[:95]}, r"g_idx' is I32 \[95\], expected I32 or I64 \[96\]"),
        ({"g_idx": order({0: 0}).float()}, r"g_idx' is F32 \[96\], expected I32 or I64 \[96\]"),
        ({"scales": scale(float("nan"))}, r"tensor 'scales' holds nan at \[1, 5\]"),
        ({"scales": scale(1e-12).bfloat16()}, r"tensor 'scales' holds 1.*e-12 at \[1, 5\], expected numbers"),
        (
            {"scales": scale(70000.0)},
            r"tensor 'scales' holds 70000.0 at \[1, 5\], expected numbers that float16",
        ),
        (
            {"scales": scale(1)[:, :23].contiguous()},
            r"scales' is F32 \[3, 23\], expected F16 or BF16 or F32 \[3, 24\]",
        ),
        ({"scales": torch.ones(7, 24)}, r"scales' is F32 \[7, 24\], expected F16 or BF16 or F32 \[3, 24\]"),
        ({"scales": torch.ones(32, 24)}, "x.scales': group size 3, expected 16 or more"),
        ({"scales": torch.ones(3, 24).int()}, r"scales' is I32 \[3, 24\], expected F16"),
        (
            {"scales": None},
            r"x.scales' is missing, expected F16 or BF16 or F32 \[3, 24\]; the layer has only g_idx",
        ),
        ({"qzeros": torch.zeros(3, 4, dtype=torch.int32)}, r"qzeros' is I32 \[3, 4\], expected I32 \[3, 3\]"),
        ({"qzeros": None}, r"x.qzeros' is missing, expected I32 \[3, 3\]"),
        ({"qweight": torch.zeros(13, 24, dtype=torch.int32)}, r"is I32 \[13, 24\], expected I32 \[12, 24\]"),
        ({"qweight": torch.zeros(24, 12, dtype=torch.int32)}, r"is I32 \[24, 12\], expected I32 \[12, 24\]"),
        ({"qweight": torch.zeros(96, 3, dtype=torch.int32)}, r"is I32 \[96, 3\], expected I32 \[12, 24\]"),
        ({"qweight": torch.zeros(12, 24)}, r"is F32 \[12, 24\], expected I32 \[12, 24\]"),
        ({"qweight": None}, r"x.qweight' is missing, expected I32 \[12, 24\]"),
    ],
)
def test_broken_tensors_are_named(tmp_path: Path, changes: Tensors, message: str) -> None:
    layer = make_layer(4, 24, 96, 32)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, layer, config(bits=4, group_size=32), **changes)


def test_nobody_guesses_how_zero_points_are_stored(tmp_path: Path) -> None:
    tensors = make_layer(4, 24, 96, 32).tensors(V1)
    for method in ("", "awq", "compressed-tensors"):
        module = write_module(tmp_path / "x.safetensors", tensors, (24, 96))
        with pytest.raises(
            CheckpointError, match=f"announces '{method or 'nothing'}', which does not tell how zero"
        ):
            gptq.layout(module, QuantConfig("config.json", method))
    # AWQ's, in the order gemv: N = K / 8 makes qweight look alike.
    tall = {"qweight": torch.zeros(16, 16), "qzeros": torch.zeros(16, 2), "scales": torch.zeros(16, 16)}
    tall |= {name: tall[name].int() for name in ("qweight", "qzeros")}
    module = write_module(tmp_path / "x.safetensors", tall, (16, 128))
    assert gptq.layout(module, QuantConfig("config.json", "awq")) is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"format": "gptq_p"},
            UnsupportedFormatError,
            "format 'gptq_p' is not supported; what works: 'gptq' and",
        ),
        ({"format": "marlin"}, UnsupportedFormatError, "checkpoint format 'marlin' is not supported"),
        ({"format": "bitblas"}, UnsupportedFormatError, "checkpoint format 'bitblas' is not supported"),
        (
            {"raw": {"is_marlin_format": True}},
            UnsupportedFormatError,
            "checkpoint format 'marlin' is not supported",
        ),
        (
            {"raw": {"checkpoint_format": "gptq", "format": "gptq_v2"}},
            CheckpointError,
            "both 'gptq' and 'gptq_v2', whose zero points differ by one",
        ),
        ({"raw": {"checkpoint_format": 2}}, CheckpointError, "'checkpoint_format' is 2, expected a string"),
        ({"raw": {"pack_dtype": "int16"}}, UnsupportedFormatError, "packed into int16 is not supported"),
        ({"bits": 5}, UnsupportedFormatError, "GPTQ with 5 bits is not supported; what works: 2, 3, 4, 8"),
        (
            {"group_size": 8},
            UnsupportedFormatError,
            "groups of 8 is not supported; what works: 16 or more, or -1",
        ),
        ({"raw": {"sym": "yes"}}, CheckpointError, "'sym' is 'yes', expected true or false"),
        ({"raw": {"desc_act": 1}}, CheckpointError, "'desc_act' is 1, expected true or false"),
        ({"raw": {"meta": "gptqmodel"}}, CheckpointError, "'meta' is 'gptqmodel', expected an object"),
        ({"raw": {"dynamic": []}}, CheckpointError, "'dynamic' is an array of 0, expected an object"),
        ({"raw": {"dynamic": {"x": 4}}}, CheckpointError, "'x' is 4, expected an object"),
        ({"raw": {"dynamic": {"x": {"bits": 16}}}}, UnsupportedFormatError, "GPTQ with 16 bits"),
    ],
)
def test_what_the_configuration_alone_shows_is_refused(
    changes: dict[str, Any], error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        announced(config(**changes))
    assert type(caught.value) is error


def test_exllama2_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"method 'exl2' is not supported; what works: .*gptq"):
        announced(QuantConfig("config.json", "exl2"))


def test_the_first_dynamic_rule_that_matches_from_the_start_counts() -> None:
    rules = {
        r"-:.*\.mlp\.gate": {},
        r"+:model\.layers\.1\..*": {"bits": 8},
        r"model\.layers\.1[0-9]\.": {"group_size": 32},
        r"layers\.2": {"bits": 2},
    }
    quant = config(bits=4, group_size=128, raw={"dynamic": rules, "lm_head": False})
    expected = {
        "model.layers.1.mlp.gate_proj": Advice(quantized=False),
        "model.layers.1.mlp.up_proj": Advice(None, 8, 128),
        "model.layers.12.mlp.up_proj": Advice(None, 4, 32),
        "model.layers.2.mlp.up_proj": Advice(None, 4, 128),
        "lm_head": Advice(quantized=False),
    }
    assert {name: gptq.advise(quant, name) for name in expected} == expected


def test_rules_behind_one_that_cannot_be_tried_claim_nothing() -> None:
    quant = config(bits=4, raw={"dynamic": {r"+:.*\.1\.": {"bits": 2}, r"-:(?!x).*": {}, ".*": {"bits": 8}}})
    assert gptq.advise(quant, "model.layers.1.mlp.up_proj").bits == 2
    assert gptq.advise(quant, "model.layers.2.mlp.up_proj") == Advice()


@pytest.mark.timeout(60)
def test_no_rule_takes_long() -> None:
    quant = config(raw={"dynamic": {"(.*)*x" + "(a+)+" * rule: {} for rule in range(20)}})
    assert gptq.advise(quant, "model.layers.1.self_attn.q_proj." + "a" * 500) == Advice()


def altered(tmp_path: Path, folder: str, claims: dict[str, Any]) -> HFCheckpoint:
    target = tmp_path / folder
    shutil.copytree(GOLDEN / folder, target)
    (target / "quantize_config.json").unlink()
    data = json.loads((target / "config.json").read_text())
    data["quantization_config"] |= claims
    (target / "config.json").write_text(json.dumps(data))
    return HFCheckpoint(target)


def test_claims_that_the_tensors_contradict_are_noted(tmp_path: Path) -> None:
    claims = {"bits": 8, "group_size": 32, "dynamic": {r"-:.*\.down_proj": {}}}
    checkpoint = altered(tmp_path, "gptqmodel_w4_g64_sym_desc", claims)
    notes = "\n".join(checkpoint.notes)
    assert "config.json says that model.layers.0.self_attn.q_proj is of 8 bits, its tensors say 4" in notes
    assert "q_proj is in groups of 32, its tensors say 64 (and 5 others)" in notes
    assert (
        "config.json says that model.layers.0.mlp.down_proj is not quantised, its tensors say gptq" in notes
    )
    digest = hashlib.sha256(checkpoint.read("layers.0.q").dequantize().half().numpy().tobytes()).hexdigest()
    expected = EXPECTED["gptqmodel_w4_g64_sym_desc"]["sha256"]["model.layers.0.self_attn.q_proj.weight"]
    assert digest == expected


def test_a_quantised_head_is_read(tmp_path: Path) -> None:
    layer = make_layer(4, 128, 128, 64)
    module = write_module(tmp_path / "x.safetensors", layer.tensors(V1), (128, 128), "lm_head")
    weight = read_module(module, find_layout(module, config()))
    assert torch.equal(weight.dequantize(), layer.weights())
