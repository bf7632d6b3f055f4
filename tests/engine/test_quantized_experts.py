"""Experts in 4 bits, some of them dense, with a quantised router: the model that holds the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awq_files
import compressed_files
import gptq_files
import numpy as np
import pytest
import torch
from packed_families import EXPERT_ROWS as GROUP
from packed_families import pack_gpt_oss, wide, write
from safetensors.torch import load_file
from test_families_moe import step
from test_model_golden import GOLDEN, assert_close, load
from transformers import AutoModelForCausalLM

from appliance.engine.executors import Executor
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.gptq.layout import V2
from appliance.quant.hf import file as hf_file
from appliance.quant.hf.checkpoint import HFCheckpoint
from appliance.quant.tensor import DenseTensor, QuantTensor

Tensors = dict[str, torch.Tensor]
IDS = [5, 17, 99, 3, 64, 120, 31, 8, 8, 77, 46, 12]
DENSE = ("embed_tokens", "norm", "experts.1.")
QUANTIZATION: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": GROUP},
            }
        },
    },
}


def rounded(weight: torch.Tensor, *, symmetric: bool) -> gptq_files.Layer:
    """Round to nearest, in groups."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, GROUP).numpy()
    low, high = groups.min(-1), groups.max(-1)
    span = 2 * np.maximum(-low, high) if symmetric else high - low
    scales = (span / 15).astype(np.float16)
    zeros = np.full(low.shape, 8) if symmetric else np.clip(np.rint(-low / scales), 0, 15).astype(int)
    codes = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15).astype(int)
    return gptq_files.Layer(4, codes.reshape(rows, -1), zeros, scales, np.arange(columns) // GROUP)


def packed(method: str, layer: gptq_files.Layer) -> Tensors:
    if method == "gptq":
        return layer.tensors(V2)
    if method == "awq":
        stored = awq_files.pack_gemm(layer.codes, layer.zeros, layer.scales)
        return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in stored.items()}
    return {
        "weight_packed": compressed_files.stream(torch.from_numpy(layer.codes), 4),
        "weight_scale": torch.from_numpy(layer.scales),
        "weight_shape": torch.tensor(layer.codes.shape),
    }


def logits(executor: Executor) -> torch.Tensor:
    return step(executor, {0: (IDS, 0)})[0]


def transformers_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return result


@pytest.mark.parametrize("method", QUANTIZATION)
@pytest.mark.parametrize("name", ["arch_qwen3_moe", "arch_mixtral"])
def test_single_experts_in_any_format(name: str, method: str, tmp_path: Path) -> None:
    config, tensors = wide(name)
    quantized: Tensors = {}
    for tensor, weight in list(tensors.items()):
        module = tensor.removesuffix(".weight")
        if any(part in tensor for part in DENSE):
            quantized[tensor] = weight
            continue
        layer = rounded(weight, symmetric=method == "compressed-tensors")
        quantized |= {f"{module}.{suffix}": value for suffix, value in packed(method, layer).items()}
        tensors[tensor] = layer.weights()
    dense = write(tmp_path / "dense", config, tensors)
    folder = write(tmp_path / "packed", config | {"quantization_config": QUANTIZATION[method]}, quantized)
    with HFCheckpoint(folder) as checkpoint:
        assert isinstance(checkpoint.read("layers.1.router"), QuantTensor)
        assert isinstance(checkpoint.read("layers.0.experts.0.down"), QuantTensor)
        assert isinstance(checkpoint.read("layers.0.experts.1.down"), DenseTensor)
    expected = logits(load(dense))
    assert torch.equal(logits(load(folder, dense_bytes=0)), expected)
    assert_close(expected, transformers_logits(dense))


def test_stacked_experts_in_mxfp4(tmp_path: Path) -> None:
    folder, dense = pack_gpt_oss(tmp_path)
    expected = logits(load(dense))
    executor = load(folder, dense_bytes=0)
    assert torch.equal(logits(executor), expected)
    assert executor.weight_bytes < load(dense, dense_bytes=0).weight_bytes
    assert_close(expected, transformers_logits(dense))


@pytest.mark.parametrize("name", ["arch_qwen3_moe", "arch_mixtral"])
def test_experts_that_transformers_stacked(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    tensors = load_file(tmp_path / "stacked" / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 24, 64)
    assert torch.equal(logits(load(tmp_path / "stacked")), logits(load(GOLDEN / name)))


def test_only_the_bytes_of_an_expert_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, nbytes = hf_file.read_range, []

    def counted(path: Path, handle: int, tensor: str, offset: int, count: int) -> Any:
        nbytes.append(count)
        return read(path, handle, tensor, offset, count)

    monkeypatch.setattr(hf_file, "read_range", counted)
    with open_checkpoint(GOLDEN / "arch_gpt_oss") as checkpoint:
        down = checkpoint.read("layers.1.experts.2.down").dequantize()
        up = checkpoint.read("layers.1.experts.2.up").dequantize()
        bias = checkpoint.read("layers.1.experts.2.gate.bias").dequantize()
    tensors = load_file(GOLDEN / "arch_gpt_oss" / "model.safetensors")
    p = "model.layers.1.mlp.experts."
    assert torch.equal(down, tensors[p + "down_proj"][2].t())
    assert torch.equal(up, tensors[p + "gate_up_proj"][2, :, 1::2].t())
    assert torch.equal(bias, tensors[p + "gate_up_proj_bias"][2, ::2])
    assert nbytes == [4 * 20 * 64, 4 * 40 * 64, 4 * 40]
