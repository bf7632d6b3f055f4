"""Each family in 4 bits, rounded to nearest and packed here: as the dense model that holds what the codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import DENSE_FAMILIES, Part, SmallModel

from appliance.quant.report import report

GOLDEN = Path(__file__).parents[1] / "golden"
GROUP = 16
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def rounded(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a packed layer, and the weights that they stand for."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, GROUP)
    scales = groups.abs().amax(dim=2) / 7
    codes = (groups / scales.unsqueeze(2)).round().clamp(-8, 7)
    shifted = (codes.to(torch.int64) + 8).view(rows, -1, 8)
    words = (shifted << (4 * torch.arange(8))).sum(dim=2)
    packed = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, (codes * scales.unsqueeze(2)).view(rows, columns)


def write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_packed_layers_give_the_logits_of_dense_ones(family: str, tmp_path: Path) -> None:
    source = GOLDEN / f"arch_{family}"
    config = json.loads((source / "config.json").read_text())
    packed, dense = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    layers = [name for name in packed if name.endswith("_proj.weight")]
    for name in layers:
        tensors, dense[name] = rounded(packed.pop(name))
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in tensors.items()}
    packed_folder = write(tmp_path / "packed", config | {"quantization_config": QUANTIZATION}, packed)
    dense_folder = write(tmp_path / "dense", config, dense)
    kinds = [layer.format for layer in report(packed_folder).layers if not layer.is_dense]
    assert kinds == ["compressed-tensors-pack"] * len(layers)
    ids = tuple(load_file(source / "expected.safetensors")["input_ids"][0].tolist())
    got, expected = (SmallModel(folder).run([Part(0, ids)])[0] for folder in (packed_folder, dense_folder))
    assert torch.equal(got, expected)
    assert not torch.equal(got, SmallModel(source).run([Part(0, ids)])[0])
