"""Model folders of random weights, as large as a test needs them, with a tokeniser like Llama 2's."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from test_tokenizer import TEXTS
from tokenizer_folders import llama2, write_folder

NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
VOCAB = 512


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """A folder that is loaded and served; its weights take 22 · layers · hidden² bytes.

    The layers do next to nothing, so that the model repeats the last token for ever.
    """
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 3 // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    write_folder(folder, llama2([text for text in TEXTS if text]), config=sizes, tokenizer_config=NAMES)
    save_file(_tensors(hidden, sizes["intermediate_size"], layers), folder / "model.safetensors")
    return folder


def _tensors(hidden: int, intermediate: int, layers: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 0.01) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).mul_(scale).half()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for index in range(layers):
        layer = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.ones(hidden)
        for name in ("q", "k", "v", "o"):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = matrix(intermediate, hidden)
        tensors[f"{layer}mlp.down_proj.weight"] = matrix(hidden, intermediate)
    return tensors
