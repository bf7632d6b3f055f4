"""GPTQModel: `python quantize_gptqmodel.py OUT '{"bits": 4, "group_size": 128}'`."""

from __future__ import annotations

import os

# Before the import: two workers are the fewest, and what GPTQModel compiles for itself it does without.
os.environ |= {"GPTQMODEL_CPU_WORKERS": "2", "GPTQMODEL_DISABLE_PACK_EXT": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tiny_model import arguments, linears, samples, save_weights, weight_of


def main() -> None:
    dense, quantized, weights, options = arguments()
    model = GPTQModel.load(str(dense), QuantizeConfig(**options), device="cpu")
    texts = [torch.tensor(ids) for ids in samples()]
    model.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts])
    model.save(str(quantized))
    backend = BACKEND.TORCH_AWQ if options.get("method") == "awq" else BACKEND.TORCH
    loaded = GPTQModel.load(str(quantized), device="cpu", backend=backend, dtype=torch.float16)
    save_weights(
        {name: weight_of(layer, layer.in_features) for name, layer in linears(loaded.model).items()}, weights
    )


main()
