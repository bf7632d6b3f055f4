"""A Llama with random weights to quantise, and the weights a tool computes from it. For the tools' interpreters."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENIZER = Path(__file__).parents[1] / "golden" / "gguf_f16" / "tokenizer.json"
VOCAB = 128
SAMPLES, SAMPLE_TOKENS = 16, 64


def arguments() -> tuple[Path, Path, Path, dict[str, Any]]:
    """Of a script called as `SCRIPT OUT OPTIONS`: the folders of the dense model, which is made here, and of the
    quantised one; the file for the tool's weights; and the tool's options, which are JSON."""
    out, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    save_model(out / "dense")
    return out / "dense", out / "model", out / "weights.safetensors", options


def save_model(folder: Path) -> None:
    """Two layers in float16, with columns that stand out, so that scales differ between groups."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for module in linears(model).values():
        columns = torch.randperm(module.in_features)[:8]
        module.weight.data[:, columns] *= 1 + 7 * torch.rand(8)
    model.half().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER)).save_pretrained(folder)


def samples() -> list[list[int]]:
    """Random text to calibrate with."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, VOCAB, (SAMPLES, SAMPLE_TOKENS), generator=generator).tolist()


def linears(model: torch.nn.Module) -> dict[str, Any]:
    """The matrices of the layers, by their names in the checkpoint; quantised ones too."""
    return {name: module for name, module in model.named_modules() if name.endswith("_proj")}


def save_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    save_file({name: weight.detach().contiguous() for name, weight in weights.items()}, path)


def weight_of(module: Any, in_features: int) -> torch.Tensor:
    """[N, K], by what a layer without a bias makes of the identity."""
    with torch.no_grad():
        return module(torch.eye(in_features, dtype=torch.float16)).reshape(in_features, -1).t()
