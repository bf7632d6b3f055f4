"""AutoRound's configurations over the tensors of other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_files import make_layer, write_module

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gptq.layout import V1, V2
from appliance.quant.gptq.layout import layout as gptq_layout
from appliance.quant.hf import autoround
from appliance.quant.hf.formats import announced, find_layout
from appliance.quant.hf.module import Advice
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.hf.readers import read_module


def config(packing: str, method: str = "auto-round", **raw: Any) -> QuantConfig:
    return QuantConfig("config.json", method, 4, 32, packing, raw)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("packing", "backend", "version"),
    [
        ("auto_round:auto_gptq", None, V1),
        ("auto_round:gptq", None, V1),
        ("auto_round", None, V2),
        ("auto_round:gptqmodel", None, V2),
        ("", None, V1),
        ("", "autoround:exllamav2", V2),
        ("", "auto", V1),
    ],
)
def test_the_packing_tells_how_zero_points_are_stored(
    tmp_path: Path, method: str, packing: str, backend: str | None, version: str
) -> None:
    layer = make_layer(4, 24, 96, 32)
    tensors = layer.tensors(version)
    del tensors["g_idx"]
    quant = config(packing, method, sym=False, backend=backend)
    announced(quant)
    module = write_module(tmp_path / "x.safetensors", tensors, (24, 96))
    found = find_layout(module, quant)
    assert found.format == version
    assert torch.equal(read_module(module, found).dequantize(), layer.weights())


@pytest.mark.parametrize("packing", ["auto_round:auto_awq", "auto_round:llm_compressor"])
def test_packings_of_other_formats_do_not_tell(tmp_path: Path, packing: str) -> None:
    quant = config(packing)
    announced(quant)
    module = write_module(tmp_path / "x.safetensors", make_layer(4, 24, 96, 32).tensors(V2), (24, 96))
    with pytest.raises(CheckpointError, match="does not tell how zero points are stored"):
        gptq_layout(module, quant)


@pytest.mark.parametrize(
    ("quant", "error", "message"),
    [
        (
            config("auto_round:fp8"),
            UnsupportedFormatError,
            "packing 'auto_round:fp8' is not supported; what works: auto_",
        ),
        (config("auto_round:rrq"), UnsupportedFormatError, "packing 'auto_round:rrq' is not supported"),
        (config("mlx"), UnsupportedFormatError, "packing 'mlx' is not supported"),
        (config("gptq"), UnsupportedFormatError, "packing 'gptq' is not supported"),
        (
            config("auto_round", data_type="mx_fp"),
            UnsupportedFormatError,
            "weights of type 'mx_fp' is not supported",
        ),
        (config("auto_round", sym=1), CheckpointError, "'sym' is 1, expected true or false"),
        (config("auto_round", extra_config={"x": 3}), CheckpointError, "'x' is 3, expected an object"),
        (
            config("auto_round", extra_config={"x": {"bits": "8"}}),
            CheckpointError,
            "'bits' is '8', expected an int",
        ),
    ],
)
def test_what_the_configuration_alone_shows_is_refused(
    quant: QuantConfig, error: type[CheckpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        announced(quant)


def test_layers_have_entries_of_their_own() -> None:
    extra = {"a": {"bits": 16}, "b": {"bits": 8, "group_size": 64}, "c": {"group_size": -1}}
    quant = config("auto_round", extra_config=extra)
    assert {name: autoround.advise(quant, name) for name in "abcd"} == {
        "a": Advice(quantized=False),
        "b": Advice(True, 8, 64),
        "c": Advice(True, 4, -1),
        "d": Advice(None, 4, 32),
    }
    pattern = config("auto_round", extra_config=extra | {".*down.*": {"bits": 2}})
    assert autoround.advise(pattern, "b") == Advice(True, 8, 64)
    assert autoround.advise(pattern, "d") == Advice()
