"""llm-compressor: `python quantize_llmcompressor.py OUT '{"scheme": "W4A16"}'`."""

from __future__ import annotations

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from tiny_model import SAMPLE_TOKENS, SAMPLES, arguments, linears, samples, save_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig


def main() -> None:
    dense, quantized, weights, options = arguments()
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16)
    texts = samples()
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(dense),
        dataset=Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(ids) for ids in texts]}),
        recipe=GPTQModifier(ignore=["lm_head"], **options),
        num_calibration_samples=SAMPLES,
        max_seq_length=SAMPLE_TOKENS,
        output_dir=str(quantized),
    )
    unpack = CompressedTensorsConfig(run_compressed=False)
    loaded = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float16, quantization_config=unpack)
    save_weights({name: layer.weight for name, layer in linears(loaded).items()}, weights)


main()
