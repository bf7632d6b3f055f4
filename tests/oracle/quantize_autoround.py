"""AutoRound: `python quantize_autoround.py OUT '{"format": "auto_round", "scheme": "W4A16"}'`."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from tiny_model import SAMPLE_TOKENS, SAMPLES, arguments, linears, samples, save_weights, weight_of
from transformers import AutoModelForCausalLM, AutoRoundConfig, AutoTokenizer


def main() -> None:
    dense, quantized, weights, options = arguments()
    layout = options.pop("format")
    rounding = AutoRound(
        AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16),
        AutoTokenizer.from_pretrained(dense),
        dataset=[torch.tensor([ids]) for ids in samples()],
        iters=2,
        nsamples=SAMPLES,
        seqlen=SAMPLE_TOKENS,
        batch_size=SAMPLES,
        device_map="cpu",
        enable_torch_compile=False,
        **options,
    )
    # In two steps, because `quantize_and_save` makes up a folder of its own.
    rounding.quantize()
    rounding.save_quantized(str(quantized), format=layout)
    loaded = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float16, device_map="cpu", quantization_config=AutoRoundConfig(backend="torch")
    )
    save_weights(
        {name: weight_of(layer, layer.infeatures) for name, layer in linears(loaded).items()}, weights
    )


main()
