"""The reader of each tensor type."""

from __future__ import annotations

from collections.abc import Callable

from appliance.quant.gguf import blocks, kquants
from appliance.quant.gguf.raw import Bytes
from appliance.quant.tensor import Weight

READERS: dict[str, Callable[[Bytes], Weight]] = {
    "F32": blocks.f32,
    "F16": blocks.f16,
    "BF16": blocks.bf16,
    "Q4_0": blocks.q4_0,
    "Q4_1": blocks.q4_1,
    "Q5_0": blocks.q5_0,
    "Q5_1": blocks.q5_1,
    "Q8_0": blocks.q8_0,
    "Q2_K": kquants.q2_k,
    "Q3_K": kquants.q3_k,
    "Q4_K": kquants.q4_k,
    "Q5_K": kquants.q5_k,
    "Q6_K": kquants.q6_k,
    "IQ4_NL": blocks.iq4_nl,
    "IQ4_XS": kquants.iq4_xs,
    "MXFP4": blocks.mxfp4,
}
"""By ggml's name of the type: raw bytes [N, row bytes] → weight [N, K], sharing no memory with them."""
