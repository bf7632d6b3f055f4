"""AutoGPTQ: `python quantize_autogptq.py OUT '{"bits": 4, "group_size": 128, "desc_act": false, "sym": true}'`."""

from __future__ import annotations

import torch
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
from auto_gptq.modeling import LlamaGPTQForCausalLM, _base
from tiny_model import arguments, linears, samples, save_weights, weight_of
from transformers import AutoTokenizer, LlamaForCausalLM


def without_cuda() -> None:
    """AutoGPTQ quantises on the first CUDA device and waits for it; here that is the CPU."""
    if not torch.cuda.is_available():
        _base.CUDA_0 = torch.device("cpu")
        torch.cuda.synchronize = lambda: None


def main() -> None:
    dense, quantized, weights, options = arguments()
    without_cuda()
    # AutoGPTQForCausalLM.from_pretrained does no more than this, but refuses where there is no CUDA.
    source = LlamaForCausalLM.from_pretrained(dense, torch_dtype=torch.float16).eval()
    model = LlamaGPTQForCausalLM(source, False, BaseQuantizeConfig(**options))
    texts = [torch.tensor([ids]) for ids in samples()]
    model.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts])
    model.save_quantized(str(quantized))
    AutoTokenizer.from_pretrained(dense).save_pretrained(quantized)
    loaded = AutoGPTQForCausalLM.from_quantized(str(quantized), device="cpu")
    save_weights(
        {name: weight_of(layer, layer.infeatures) for name, layer in linears(loaded.model).items()}, weights
    )


main()
