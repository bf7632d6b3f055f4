"""What the files of a model folder claim about the weights, and where claims alone must not decide."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.hf.quant_config import read_quant_config
from appliance.quant.report import report

GOLDEN = Path(__file__).parents[1] / "golden"
ASYMMETRIC_V2 = "gptqmodel_w8_gneg1_asym_v2"
SYMMETRIC_V2 = "gptqmodel_w4_g128_sym_v2"
ACT_ORDER = "gptqmodel_w4_g64_sym_desc"
PLAIN = "gptqmodel_w4_g64_asym"


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def edit(path: Path, **changes: Any) -> dict[str, Any]:
    """Sets keys of a JSON object; those of value None are removed."""
    content: dict[str, Any] = json.loads(path.read_bytes()) | changes
    content = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(content))
    return content


def edit_quantization(folder: Path, **changes: Any) -> None:
    section = json.loads((folder / "config.json").read_bytes())["quantization_config"] | changes
    edit(folder / "config.json", quantization_config={k: v for k, v in section.items() if v is not None})


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with HFCheckpoint(folder) as checkpoint:
        return {name: checkpoint.read(name).dequantize() for name in checkpoint.names()}


def assert_same_weights(folder: Path, name: str) -> None:
    found, expected = weights(folder), weights(GOLDEN / name)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_two_files_at_odds_on_how_zero_points_are_stored_are_refused_by_name(tmp_path: Path) -> None:
    folder = copy_of(ASYMMETRIC_V2, tmp_path)
    edit(folder / "quantize_config.json", format="gptq", checkpoint_format="gptq")
    message = r"config\.json says that the checkpoint format is 'gptq_v2', quantize_config\.json says another"
    with pytest.raises(CheckpointError, match=message):
        HFCheckpoint(folder)


def test_symmetric_zero_points_tell_how_they_are_stored(tmp_path: Path) -> None:
    folder = copy_of(SYMMETRIC_V2, tmp_path)
    edit(folder / "quantize_config.json", format="gptq", checkpoint_format="gptq")
    assert_same_weights(folder, SYMMETRIC_V2)
    (note,) = HFCheckpoint(folder).notes
    assert note.startswith(
        "config.json says that the format is gptq_v2, quantize_config.json that it is gptq"
    )


def test_zero_points_wrongly_said_to_be_symmetric_cannot_tell(tmp_path: Path) -> None:
    folder = copy_of(ASYMMETRIC_V2, tmp_path)
    edit(folder / "quantize_config.json", format="gptq", checkpoint_format="gptq", sym=True)
    edit_quantization(folder, sym=True)
    with pytest.raises(CheckpointError, match=r"zero points differ .* these disagree on whether"):
        HFCheckpoint(folder).read("layers.0.q")


def test_what_config_json_is_silent_on_the_tools_own_file_says(tmp_path: Path) -> None:
    folder = copy_of(ASYMMETRIC_V2, tmp_path)
    edit_quantization(folder, checkpoint_format=None, format=None, bits=None, group_size=None, sym=None)
    assert_same_weights(folder, ASYMMETRIC_V2)
    claims, notes = read_quant_config(folder, json.loads((folder / "config.json").read_bytes()))
    assert (claims.bits, claims.group_size, claims.format, claims.disputed) == (8, -1, "gptq_v2", "")
    assert claims.raw["sym"] is False
    assert notes == ()


@pytest.mark.parametrize(
    ("key", "missing"), [("attention_bias", "self_attn.q_proj.bias"), ("mlp_bias", "mlp.gate_proj.bias")]
)
def test_biases_that_the_configuration_promises_must_be_there(key: str, missing: str, tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", **{key: True})
    with pytest.raises(CheckpointError, match=f"'model.layers.0.{missing}' is missing"):
        HFCheckpoint(folder)


def test_heads_that_rope_cannot_turn_are_refused(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", head_dim=33)
    with pytest.raises(CheckpointError, match="attention heads of 33, expected an even size for RoPE"):
        HFCheckpoint(folder)


def test_rope_of_its_own_for_some_layers_is_refused(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 8.0}})
    with HFCheckpoint(folder) as checkpoint, pytest.raises(UnsupportedModelError, match="full_attention"):
        read_spec(checkpoint.architecture, checkpoint.metadata, frozenset(checkpoint.names()))


@pytest.mark.parametrize(("layer", "known"), [("1", True), ("2", False), ("01x", False), ("9" * 5000, False)])
def test_only_announced_prediction_layers_are_skipped(layer: str, known: bool, tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", num_nextn_predict_layers=1)
    add_tensors(folder, **{f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(1)})
    if known:
        (note,) = HFCheckpoint(folder).notes
        assert note == "skipped model.layers.1.mlp.up_proj.weight: a multi-token prediction head"
    else:
        with pytest.raises(CheckpointError, match="belongs to no layer of this model"):
            HFCheckpoint(folder)


def test_a_huge_number_of_prediction_layers_takes_no_time(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", num_nextn_predict_layers=10**15)
    add_tensors(folder, odd=torch.ones(1))
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="'odd' belongs to no layer"):
        HFCheckpoint(folder)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(("name", "ordered"), [(ACT_ORDER, True), (PLAIN, False)])
def test_act_order_is_told_from_the_groups_in_either_width(name: str, ordered: bool, tmp_path: Path) -> None:
    folder = copy_of(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    add_tensors(folder, **{key: value.long() for key, value in tensors.items() if key.endswith("g_idx")})
    details = {layer.detail for layer in report(folder).layers if not layer.is_dense}
    assert details == {"4 bits in groups of 64" + (", act-order" if ordered else "")}


def test_thousands_of_rules_are_refused_or_cheap(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    start = time.perf_counter()
    for count in (4000, 5000):
        edit_quantization(folder, dynamic={rf"-:.*layers\.{rule}\.odd": {} for rule in range(count)})
        if count < 4096:
            assert HFCheckpoint(folder).notes == ()
        else:
            with pytest.raises(UnsupportedFormatError, match=r"5000 patterns .* at most 4096"):
                HFCheckpoint(folder)
    assert time.perf_counter() - start < 20


def test_an_error_never_quotes_a_whole_file(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", architectures=["x" * 100_000])
    with pytest.raises(UnsupportedFormatError, match="what works: LlamaForCausalLM") as caught:
        HFCheckpoint(folder)
    assert len(str(caught.value)) < 1000


def test_code_of_its_own_is_never_run(tmp_path: Path) -> None:
    folder = copy_of(PLAIN, tmp_path)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"})
    assert_same_weights(folder, PLAIN)
    edit(folder / "config.json", architectures=["XForCausalLM"])
    with pytest.raises(UnsupportedFormatError, match=r"XForCausalLM' .it brings code of its own"):
        HFCheckpoint(folder)
