"""What compressed-tensors configurations claim of layers, what is refused from them, and what people are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_files import Tensors, edited

from appliance.quant.compressed.config import advise, check, notes, weight_args
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.module import Advice
from appliance.quant.hf.quant_config import QuantConfig

GOLDEN = Path(__file__).parents[1] / "golden"
ASYM = GOLDEN / "ct_w4a16_g64_asym_gptq"
UP = "model.layers.3.mlp.up_proj"
WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 64}


def quant(**raw: Any) -> QuantConfig:
    return QuantConfig("config.json", "compressed-tensors", raw=raw)


def group(targets: list[str], bits: int = 4, **changes: Any) -> dict[str, Any]:
    return {"targets": targets, "weights": {**WEIGHTS, "num_bits": bits}} | changes


def test_a_name_counts_before_a_pattern_before_a_class() -> None:
    groups = {
        "a": group(["Linear"], 2),
        "b": group(["re:.*down_proj", r"re:model\.layers\.3\..*"], 3),
        "c": group([UP], 8),
    }
    config = quant(config_groups=groups, ignore=["lm_head", "re:.*[vo]_proj$"])
    bits = {
        UP: 8,
        "model.layers.3.mlp.gate_proj": 3,
        "model.layers.9.mlp.gate_proj": 2,
        "model.layers.9.mlp.down_proj": 3,
    }
    assert {name: advise(config, name) for name in bits} == {n: Advice(True, b, 64) for n, b in bits.items()}
    for name in ("lm_head", "model.layers.3.self_attn.o_proj", "model.embed_tokens"):
        assert advise(config, name) == Advice(quantized=False)
        assert weight_args(config, name) is None


def test_patterns_are_anchored_at_the_start_only() -> None:
    config = quant(config_groups={"a": group(["re:layers"]), "b": group(["re:model|lm_head"], 8)})
    assert advise(config, UP).bits == 8
    assert advise(config, "lm_head").bits == 8


@pytest.mark.parametrize(
    ("preset", "advice"),
    [
        ("W4A16", Advice(True, 4, 128)),
        ("w4a16_asym", Advice(True, 4, 128)),
        ("W8A8", Advice(True, 8, -1)),
        ("FP8_DYNAMIC", Advice(True, 8, -1)),
        ("FP8_BLOCK", Advice(True, 8, 128)),
        ("UNQUANTIZED", Advice(quantized=False)),
    ],
)
def test_presets_stand_for_their_arguments(preset: str, advice: Advice) -> None:
    for groups in ({preset: ["Linear"]}, {"group_0": preset}):
        config = quant(config_groups=groups)
        check(config)
        assert advise(config, UP) == advice
    assert bool(notes(config)) == (preset in ("W8A8", "FP8_DYNAMIC", "FP8_BLOCK"))


def test_an_asymmetric_preset_asks_for_zero_points() -> None:
    args = [weight_args(quant(config_groups={name: ["Linear"]}), UP) for name in ("W4A16", "W4A16_ASYM")]
    assert [a and a.symmetric for a in args] == [True, False]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"format": "nvfp4-pack-quantized"},
            "format is 'nvfp4-pack-quantized'.* what works: pack-quantized, int-",
        ),
        ({"format": "mxfp4-pack-quantized"}, "format is 'mxfp4-pack-quantized'"),
        ({"format": "marlin-24"}, "format is 'marlin-24'"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config rotates activations"),
        ({"quantization_status": "calibration"}, "quantization_status is 'calibration'.* compressed, frozen"),
        ({"config_groups": {"g": group(["Linear"], 7)}}, "type 'int' with 7 bits are not supported"),
        (
            {"config_groups": {"g": group(["Linear"], format="nvfp4-pack-quantized")}},
            "format of a group is 'nvfp4",
        ),
        ({"config_groups": {"NVFP4": ["Linear"]}}, "preset 'NVFP4' is not supported; what works: .*W4A16"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}},
            "type 'float' with 4 bits",
        ),
        (
            {
                "config_groups": {
                    "g": {"targets": [], "weights": {"strategy": "tensor_group", "group_size": 16}}
                }
            },
            "strategy is 'tensor_group'",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=f"config.json: .*{message}"):
        check(quant(**raw))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"config_groups": [1]}, "'config_groups' is an array of 1, expected an object"),
        ({"config_groups": {"g": 7}}, "config_groups 'g' is 7, expected an object"),
        ({"config_groups": {"g": {"weights": WEIGHTS}}}, "config_groups 'g': metadata 'targets' is missing"),
        ({"config_groups": {"g": {"targets": [], "weights": {"num_bits": "4"}}}}, "'num_bits' is '4'"),
        (
            {"config_groups": {"g": {"targets": [], "weights": {"strategy": "group"}}}},
            "'group_size' is missing",
        ),
        (
            {"config_groups": {"g": {"targets": [], "weights": {"block_structure": "8y8"}}}},
            "block_structure is '8y8'",
        ),
        ({"ignore": "lm_head"}, "'ignore' is 'lm_head', expected an array"),
        ({"format": 4}, "'format' is 4, expected a string"),
    ],
)
def test_mistyped_entries_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check(quant(**raw))


def test_a_pattern_that_is_not_understood_makes_the_configuration_silent() -> None:
    config = quant(config_groups={"g": group(["Linear"])}, ignore=["re:(?!model).*"])
    check(config)
    assert advise(config, UP) == Advice()
    assert weight_args(config, UP) is None
    (note,) = notes(config)
    assert r"regular expression 're:(?!model).*' is not understood" in note
    assert "the tensors decide" in note


def test_claims_that_the_tensors_contradict_are_told(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        weights = config["config_groups"]["group_0"]["weights"]
        config["config_groups"]["other"] = {
            "targets": ["re:.*down_proj"],
            "weights": weights | {"num_bits": 8, "group_size": 32},
        }
        config["ignore"] = ["re:.*gate_proj"]

    model = HFCheckpoint(edited(ASYM, tmp_path, change))
    assert model.notes == (
        "config.json says that lm_head is quantised, its tensors say it is dense: the tensors decide",
        "config.json says that model.layers.0.mlp.gate_proj is not quantised, its tensors say "
        "compressed-tensors-pack: the tensors decide",
        "config.json says that model.layers.0.mlp.down_proj is of 8 bits, its tensors say 4: the tensors decide",
        "config.json says that model.layers.0.mlp.down_proj is in groups of 32, its tensors say 64: the tensors decide",
    )
    whole = HFCheckpoint(ASYM)
    for name in ("layers.0.down", "layers.0.gate"):
        assert torch.equal(model.read(name).dequantize(), whole.read(name).dequantize())


def test_zero_points_that_are_missing_are_an_error_not_another_weight(tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight_zero_point"]

    with pytest.raises(CheckpointError, match=r"k_proj.weight_zero_point' is missing, expected I32 \[8, 2\]"):
        HFCheckpoint(edited(ASYM, tmp_path, change_tensors=drop))


def test_a_quantised_cache_is_told_and_its_scales_skipped(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)

    model = HFCheckpoint(edited(ASYM, tmp_path, change, add))
    assert model.notes == (
        "config.json asks for a quantised key-value cache: kv_cache_scheme is ignored",
        "skipped model.layers.0.self_attn.k_scale (and 1 others): scales of a quantised key-value cache",
    )


def test_data_errors_name_the_file_and_the_layer(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_scale"][3, 1] = torch.inf

    folder = edited(ASYM, tmp_path, change_tensors=spoil)
    where = r"model.safetensors: model.layers.0.mlp.up_proj: weight_scale holds NaN or infinity"
    with pytest.raises(CheckpointError, match=where):
        HFCheckpoint(folder).read("layers.0.up")
