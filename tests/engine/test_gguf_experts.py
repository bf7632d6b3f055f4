"""GGUF files of families with experts: the same bits as the folder that they were converted from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_model_golden import load
from test_quantized_experts import logits, wide, write

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.engine.spec import ClampedSwiglu
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.checkpoint import GGUFCheckpoint
from appliance.quant.tensor import QuantTensor

ARCHITECTURES = {"arch_qwen3_moe": "qwen3moe", "arch_mixtral": "llama", "arch_gpt_oss": "gpt-oss"}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def converted(tensors: dict[str, torch.Tensor], architecture: str) -> dict[str, np.ndarray]:
    """Under llama.cpp's names, experts stacked, as its converter does."""
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        value, (module, _, suffix) = tensor.numpy(), name.rpartition(".")
        if module in WHOLE:
            out[f"{WHOLE[module]}.weight"] = value
            continue
        layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module).groups()  # type: ignore[union-attr]
        single = re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", rest)
        if single:
            stacks.setdefault(f"blk.{layer}.ffn_{MATRICES[single[2]]}_exps.weight", {})[int(single[1])] = (
                value
            )
        elif rest == "mlp.experts":
            kind = "bias" if suffix.endswith("_bias") else "weight"
            value = value if kind == "bias" else value.swapaxes(1, 2)
            names = STACKS[suffix.removesuffix("_bias")]
            for place, ours in enumerate(names):
                out[f"blk.{layer}.ffn_{ours}_exps.{kind}"] = value[:, place :: len(names)]
        else:
            ours = LAYER[rest] if suffix != "sinks" else "attn_sinks"
            if architecture == "gpt-oss" and ours == "ffn_norm":
                ours = "post_attention_norm"
            if architecture == "llama" and ours in ("attn_q", "attn_k"):
                value = value.reshape(-1, 2, 8, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            out[f"blk.{layer}.{ours}.{'bias' if suffix == 'bias' else 'weight'}"] = value
    return out | {name: np.stack([stack[e] for e in sorted(stack)]) for name, stack in stacks.items()}


def metadata_of(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    found = {ours: config[theirs] for ours, theirs in KEYS.items() if config.get(theirs) is not None}
    found["rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] == "yarn":
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = rope["factor"]
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def write_gguf(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: str
) -> None:
    """With the experts' matrices in that type."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(128)])
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        tensor = np.ascontiguousarray(tensor)
        if name.endswith("exps.weight") and kind != "F32":
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(tensor, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def experts_rounded(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """What gguf's own package reads back from that type."""
    type_ = gguf.GGMLQuantizationType[kind]

    rounded = dict(tensors)
    for name, value in tensors.items():
        stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if ".experts." in name and (stacked or name.endswith(".weight")):
            rows = np.ascontiguousarray(value.mT if stacked else value)
            read = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(rows, type_), type_))
            rounded[name] = read.mT if stacked else read
    return rounded


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "F32") for name in ARCHITECTURES),
        *(("arch_qwen3_moe", "Q4_0"), ("arch_mixtral", "Q5_1"), ("arch_gpt_oss", "MXFP4")),
    ],
)
def test_logits_are_those_of_the_folder(name: str, kind: str, tmp_path: Path) -> None:
    config, tensors = wide(name)
    if name == "arch_gpt_oss":
        config["swiglu_limit"] = 7.0
    architecture = ARCHITECTURES[name]
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "x.gguf"
    write_gguf(path, architecture, metadata_of(config, architecture), converted(tensors, architecture), kind)
    if kind != "F32":
        with GGUFCheckpoint(path) as checkpoint:
            assert isinstance(checkpoint.read("layers.1.experts.3.up"), QuantTensor)
        tensors = experts_rounded(tensors, kind)
    folder = write(tmp_path / "folder", config, tensors)
    assert torch.equal(logits(load(tmp_path / "gguf", dense_bytes=0)), logits(load(folder)))


def test_what_gguf_says_of_experts_is_read_or_refused(tmp_path: Path) -> None:
    config, tensors = wide("arch_gpt_oss")
    metadata, weights = metadata_of(config, "gpt-oss"), converted(tensors, "gpt-oss")
    path = tmp_path / "x.gguf"
    write_gguf(path, "gpt-oss", metadata, weights, "F32")
    with GGUFCheckpoint(path) as checkpoint:
        found, names = dict(checkpoint.metadata), frozenset(checkpoint.names())
    spec = read_spec("gpt-oss", found, names)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.top_k, spec.experts.layers) == (4, 2, {0, 1})
    assert spec.experts.activation == ClampedSwiglu(1.702, 7.0)
    assert [layer.window for layer in spec.layers] == [8, 0]
    assert spec.sinks
    assert dict(spec.ropes[0].parameters)["truncate"] == 0
    with pytest.raises(UnsupportedModelError, match=r"gpt-oss\.expert_gating_func is 2; supported is 1"):
        read_spec("gpt-oss", found | {"gpt-oss.expert_gating_func": 2}, names)
    with pytest.raises(UnsupportedModelError, match=r"gpt-oss\.expert_group_count is 2"):
        read_spec("gpt-oss", found | {"gpt-oss.expert_group_count": 2}, names)
    write_gguf(path, "gpt-oss", metadata | {"gpt-oss.expert_count": 5}, weights, "F32")
    with pytest.raises(
        CheckpointError, match=r"_exps\.weight' has shape \(4, 32, 64\); the metadata asks for 5 experts"
    ):
        GGUFCheckpoint(path)
    write_gguf(path, "gpt-oss", metadata | {"gpt-oss.expert_count": 2**20}, weights, "F32")
    with pytest.raises(CheckpointError, match="1048576 experts, expected at most 1024"):
        GGUFCheckpoint(path)
    biases = weights.pop("blk.1.ffn_up_exps.bias")
    write_gguf(path, "gpt-oss", metadata, weights, "F32")
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up_exps\.bias' is missing$"):
        GGUFCheckpoint(path)
    weights["blk.1.ffn_up_exps.bias"] = biases
    del weights["blk.1.ffn_up_exps.weight"]
    write_gguf(path, "gpt-oss", metadata, weights, "F32")
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up_exps\.weight' is missing$"):
        GGUFCheckpoint(path)
