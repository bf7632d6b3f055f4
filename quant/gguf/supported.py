"""What is read from GGUF files. Imports no torch: refusals come before anything heavy is loaded."""

from __future__ import annotations

# By `general.architecture`, the model class that others know it by.
ARCHITECTURES = {"llama": "LlamaForCausalLM"}
TENSOR_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
