"""AutoAWQ: `python quantize_autoawq.py OUT '{"version": "gemm", "q_group_size": 128}'`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm
from tiny_model import SAMPLE_TOKENS, arguments, linears, samples, save_weights
from transformers import AutoTokenizer


class Recorder(AwqQuantizer):
    """Keeps the rounded weights that the quantiser packs."""

    rounded: ClassVar[dict[str, torch.Tensor]] = {}

    def _apply_quant(self, module: Any, named_linears: dict[str, Any]) -> None:
        super()._apply_quant(module, named_linears)
        layer = list(self.modules).index(module)
        for name, linear in named_linears.items():
            self.rounded[f"model.layers.{layer}.{name}"] = linear.weight.data


def main() -> None:
    dense, quantized, weights, options = arguments()
    model = AutoAWQForCausalLM.from_pretrained(str(dense), device_map="cpu")
    tokenizer = AutoTokenizer.from_pretrained(str(dense))
    model.quantize(
        tokenizer,
        quant_config={"w_bit": 4, "zero_point": True, **options},
        calib_data=samples(),
        max_calib_seq_len=SAMPLE_TOKENS,
        quantizer_cls=Recorder,
    )
    model.save_quantized(str(quantized))
    tokenizer.save_pretrained(str(quantized))
    computed = Recorder.rounded
    if options["version"] == "gemm":
        # The one layout that AutoAWQ itself unpacks on a CPU; for the others its rounding has to do.
        computed = {
            name: dequantize_gemm(m.qweight, m.qzeros, m.scales, m.w_bit, m.group_size).t()
            for name, m in linears(model.model).items()
        }
    save_weights(computed, weights)


main()
