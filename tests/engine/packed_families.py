"""The families' golden models in 4 bits, rounded to nearest and packed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]

GOLDEN = Path(__file__).parents[1] / "golden"
GROUP = 16
EXPERT_ROWS = 32
DENSE = ".1.mlp.experts.1."
"""One expert of a layer is not packed."""
MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
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


def wide(name: str) -> tuple[dict[str, Any], Tensors]:
    """The fixture, its experts, if there are any, of 32 rows, which fill groups."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if not any(".experts." in tensor for tensor in tensors):
        return config, tensors
    key = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    narrow = config[key]
    config[key] = EXPERT_ROWS
    generator = torch.Generator().manual_seed(1)
    for tensor, value in tensors.items():
        if ".experts." in tensor:
            resized = {narrow: EXPERT_ROWS, 2 * narrow: 2 * EXPERT_ROWS}
            shape = [resized.get(size, size) for size in value.shape]
            tensors[tensor] = torch.randn(shape, generator=generator) * value.std()
    return config, tensors


def pack_family(family: str, folder: Path) -> tuple[Path, Path]:
    """The family's model packed, and the dense one that holds what its codes stand for."""
    if family == "gpt_oss":
        return pack_gpt_oss(folder)
    config, packed = wide(f"arch_{family}")
    dense = dict(packed)
    for name in [name for name in packed if name.endswith(MATRICES) and DENSE not in name]:
        tensors, dense[name] = rounded(packed.pop(name))
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in tensors.items()}
    quantized = config | {"quantization_config": QUANTIZATION}
    return write(folder / "packed", quantized, packed), write(folder / "dense", config, dense)


def pack_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """As `pack_family`: its experts in MXFP4, all else dense."""
    config, tensors = wide("arch_gpt_oss")
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales).float()
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}}
    return write(folder / "packed", config | mxfp4, stored), write(folder / "dense", config, tensors)


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder
