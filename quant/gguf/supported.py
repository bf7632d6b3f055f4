"""What is read from GGUF files. Imports no torch: refusals come before anything heavy is loaded."""

from __future__ import annotations

# Of norms and biases.
VECTOR_TYPES = ("F32", "F16", "BF16")
_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_SUPER_BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
TENSOR_TYPES = (*VECTOR_TYPES, *_BLOCK_TYPES, *_SUPER_BLOCK_TYPES)
