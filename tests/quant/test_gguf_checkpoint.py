"""Canonical names and weights of GGUF models made by other tools."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gguf.checkpoint import GGUFCheckpoint
from appliance.quant.gguf.file import GGUFFile
from appliance.quant.gguf.metadata import eos_token_ids

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = (
    *("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q2_k", "q3_k_m", "q4_k_m", "q6_k", "iq4_nl", "iq4_xs"),
)
LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    **{f"layers.0.{ours}": f"model.layers.0.{theirs}.weight" for ours, theirs in LAYER.items()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_the_tool_reads_back(kind: str) -> None:
    folder = GOLDEN / f"gguf_{kind}"
    meta = json.loads((folder / "meta.json").read_text())
    with GGUFCheckpoint(folder / f"mini-{kind}.gguf") as checkpoint:
        assert sorted(checkpoint.names()) == sorted(NAMES)
        assert checkpoint.architecture == "llama"
        assert checkpoint.eos_token_ids == (2,)
        for ours, theirs in NAMES.items():
            dtype = getattr(torch, meta["expected_dtype"][theirs])
            weight = checkpoint.read(ours).dequantize().to(dtype)
            assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == meta["sha256"][theirs], ours


def write_llama(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> Path:
    """A two-layer Llama with q biases, after `change(metadata, tensors)`."""
    sizes = {"block_count": 2, "embedding_length": 8, "feed_forward_length": 6, "context_length": 16}
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}
    metadata |= {"tokenizer.ggml.tokens": list("abcde"), "tokenizer.ggml.eos_token_id": 4}
    shapes = {"token_embd.weight": (5, 8), "output_norm.weight": (8,)}
    for i in range(2):
        shapes |= {f"blk.{i}.attn_norm.weight": (8,), f"blk.{i}.ffn_norm.weight": (8,)}
        shapes |= {
            f"blk.{i}.attn_{n}.weight": (r, 8) for n, r in (("q", 8), ("k", 4), ("v", 4), ("output", 8))
        }
        shapes |= {
            f"blk.{i}.ffn_{n}.weight": s for n, s in (("gate", (6, 8)), ("up", (6, 8)), ("down", (8, 6)))
        }
    tensors = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in shapes.items()}
    tensors["blk.1.attn_q.bias"] = np.arange(8, dtype=np.float32)
    metadata["general.architecture"] = "llama"
    change(metadata, tensors)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_q_and_k_rows_and_biases_are_put_back_in_order(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", lambda _metadata, _tensors: None)
    with GGUFCheckpoint(path) as checkpoint:
        assert "head" not in checkpoint.names()
        # Two heads of four rows, each stored as rows 0, 2, 1, 3 of the model.
        assert checkpoint.read("layers.0.q").dequantize()[:, 0].tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
        assert checkpoint.read("layers.0.k").dequantize()[:, 0].tolist() == [0, 16, 8, 24]
        assert checkpoint.read("layers.0.v").dequantize()[:, 0].tolist() == [0, 8, 16, 24]
        assert checkpoint.read("layers.1.q.bias").dequantize().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
        assert "layers.0.q.bias" not in checkpoint.names()


def set_meta(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda metadata, _tensors: metadata.update({key: value})


def set_tensor(name: str, value: np.ndarray) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    return lambda _metadata, tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            set_meta("general.architecture", "mamba"),
            UnsupportedFormatError,
            "'mamba' is not supported; what works: ",
        ),
        (
            set_tensor("rope_freqs.weight", np.ones(2, np.float16)),
            CheckpointError,
            "'rope_freqs.weight' has type F16 and shape (2,), expected F32 of one dimension",
        ),
        (set_tensor("blk.2.odd", np.ones(2, np.float32)), UnsupportedFormatError, "'blk.2.odd'"),
        (set_tensor("output.weight", np.ones((5, 8), np.float64)), UnsupportedFormatError, "has type F64"),
        (
            set_tensor("output_norm.weight", np.ones(8, np.int8)),
            UnsupportedFormatError,
            "'output_norm.weight' has type I8; what works here: F32, F16, BF16",
        ),
        (lambda _, t: t.pop("blk.1.ffn_up.weight"), CheckpointError, "'blk.1.ffn_up.weight' is missing"),
        (lambda m, _: m.pop("llama.block_count"), CheckpointError, "'llama.block_count' is missing"),
        (set_meta("llama.block_count", "two"), CheckpointError, "'two', expected an integer"),
        (set_meta("llama.block_count", 0), CheckpointError, "is 0, expected at least 1"),
        (set_meta("llama.block_count", 2**31), CheckpointError, "expected at most 1024"),
        (set_meta("llama.attention.head_count", 3), CheckpointError, "has shape"),
        (set_meta("llama.attention.head_count_kv", 4), CheckpointError, "expected a multiple"),
        (
            set_meta("tokenizer.ggml.tokens", list("abcd")),
            CheckpointError,
            "'token_embd.weight' has shape (5, 8)",
        ),
        (
            set_meta("tokenizer.ggml.eos_token_id", 5),
            CheckpointError,
            "is 5, but the vocabulary has 5 tokens",
        ),
    ],
)
def test_contradictions_are_named_before_data_is_read(
    tmp_path: Path, change: Callable[..., Any], error: type[Exception], message: str
) -> None:
    path = write_llama(tmp_path / "x.gguf", change)
    with pytest.raises(error) as caught:
        GGUFCheckpoint(path)
    assert message in str(caught.value)
    assert "x.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("output_norm.weight", "Q8_0", "has type Q8_0; what works here: F32, F16, BF16"),
        ("blk.0.ffn_norm.weight", "Q4_K", "has type Q4_K; what works here: F32, F16, BF16"),
        ("output.weight", "IQ3_S", "has type IQ3_S; what works here: F32, F16, BF16, Q4_0"),
        ("blk.0.attn_q.weight", "TQ1_0", "has type TQ1_0; what works here: F32, F16, BF16, Q4_0"),
    ],
)
def test_types_are_refused_by_name_from_the_header(
    tmp_path: Path, name: str, kind: str, message: str
) -> None:
    content = (GOLDEN / "gguf_q6_k" / "mini-q6_k.gguf").read_bytes()
    with GGUFFile(GOLDEN / "gguf_q6_k" / "mini-q6_k.gguf") as file:
        dims = struct.pack(f"<{len(file.tensors[name].shape)}Q", *reversed(file.tensors[name].shape))
        was, now = file.tensors[name].type.id, gguf.GGMLQuantizationType[kind]
    before = name.encode() + struct.pack("<I", len(dims) // 8) + dims
    assert content.count(before + struct.pack("<I", was)) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(content.replace(before + struct.pack("<I", was), before + struct.pack("<I", now)))
    with pytest.raises(UnsupportedFormatError) as caught:
        GGUFCheckpoint(path)
    assert f"'{name}' {message}" in str(caught.value)


def test_eos_is_the_union_of_all_that_end_generation() -> None:
    metadata = {"tokenizer.ggml.tokens": list("abcde")}
    assert eos_token_ids(metadata) == ()
    metadata |= {
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert eos_token_ids(metadata) == (1, 3)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<eos>", "<end_of_turn>", "x"], (0, 1)),
        (["<|endoftext|>", "x", "<|im_end|>"], (0, 2)),
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], (0, 1, 2)),
        (["<|endoftext|>", "<|end|>", "x"], (0, 1)),
        # gpt-oss ends a part of an answer with <|end|>, and goes on.
        (["<|return|>", "<|end|>", "<|call|>"], (0, 2)),
    ],
)
def test_control_tokens_that_end_a_turn_end_generation(tokens: list[str], ends: tuple[int, ...]) -> None:
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    assert eos_token_ids({**metadata, "tokenizer.ggml.token_type": [3, 3, 3]}) == ends
    # Text that looks like one is text.
    assert eos_token_ids({**metadata, "tokenizer.ggml.token_type": [1, 1, 1]}) == (0,)


@pytest.mark.parametrize(("kind", "hidden"), [("q4_0", 128), ("q3_k_m", 256)])
def test_a_damaged_header_is_refused_or_harmless(tmp_path: Path, kind: str, hidden: int) -> None:
    whole = (GOLDEN / f"gguf_{kind}" / f"mini-{kind}.gguf").read_bytes()
    draw, path, refused = random.Random(1), tmp_path / "x.gguf", 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(4, 6000)] = draw.choice((0, 1, 128, 255))
        path.write_bytes(content)
        try:
            with GGUFCheckpoint(path) as checkpoint:
                sizes = {name: checkpoint.read(name).shape for name in checkpoint.names()}
            assert sizes["embed"] == (128, hidden)
        except CheckpointError:
            refused += 1
    assert 100 < refused < 300
