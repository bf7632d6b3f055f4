"""MXFP4 experts against transformers' own unpacking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_files import Tensors, module
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.formats import FORMATS, announced, find_layout
from appliance.quant.hf.module import Advice
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.hf.readers import read_module
from appliance.quant.tensor import QuantTensor

SHAPE = ROWS, COLUMNS = (10, 96)


def expert(**changes: torch.Tensor | None) -> Tensors:
    tensors = {
        "blocks": torch.randint(0, 256, (ROWS, COLUMNS // 32, 16), dtype=torch.uint8),
        "scales": torch.randint(0, 253, (ROWS, COLUMNS // 32), dtype=torch.uint8),
    }
    return {name: t for name, t in (tensors | changes).items() if t is not None}


def read(folder: Path, tensors: Tensors, shape: tuple[int, int] = SHAPE) -> QuantTensor:
    layer = module(folder, tensors, shape)
    weight = read_module(layer, find_layout(layer, QuantConfig("config.json", "mxfp4")))
    assert isinstance(weight, QuantTensor)
    return weight


def test_experts_are_what_transformers_unpacks(tmp_path: Path) -> None:
    tensors = expert()
    tensors["scales"][0] = torch.tensor([0, 1, 252])
    weight = read(tmp_path, tensors)
    expected = convert_moe_packed_tensors(tensors["blocks"][None], tensors["scales"][None])[0].t()
    assert expected.dtype is torch.bfloat16
    assert torch.equal(weight.dequantize(), expected.float())
    assert weight.nbytes == ROWS * (COLUMNS // 2 + 2 * COLUMNS // 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": None}, r"scales' is missing, expected U8 \[10, 3\]"),
        ({"scales": torch.zeros(3, 10).byte()}, r"scales' is U8 \[3, 10\], expected U8 \[10, 3\]"),
        ({"blocks": torch.zeros(10, 16, 3).byte()}, r"is U8 \[10, 16, 3\], expected U8 \[10, 3, 16\]"),
        ({"blocks": torch.zeros(10, 48).byte()}, r"blocks' is U8 \[10, 48\], expected U8 \[10, 3, 16\]"),
        ({"blocks": torch.zeros(10, 3, 16).char()}, "blocks' is I8"),
        ({"scales": torch.full((10, 3), 255).byte()}, "scales hold 255, which is NaN"),
    ],
)
def test_tensors_at_odds_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, expert(**changes))


def test_a_row_that_no_blocks_fill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 80 inputs, expected a multiple of 32"):
        read(tmp_path, expert(), (10, 80))


def test_the_configuration_names_what_is_not_quantised() -> None:
    names = ["model.layers.*.self_attn", "lm_head"]
    config = QuantConfig("config.json", "mxfp4", raw={"modules_to_not_convert": names})
    format_ = announced(config)
    assert format_ in FORMATS
    for name in ("model.layers.11.self_attn.q_proj", "lm_head"):
        assert format_.advise(config, name) == Advice(quantized=False)
    for name in ("model.layers.11.mlp.experts.down_proj", "model.layers.11.self_attn_norm"):
        assert format_.advise(config, name) == Advice()
    with pytest.raises(
        CheckpointError, match=r"config\.json: metadata 'modules_to_not_convert' is 'lm_head'"
    ):
        announced(QuantConfig("config.json", "mxfp4", raw={"modules_to_not_convert": "lm_head"}))
