"""The gated activation of a Llama-like feed-forward."""

from appliance.kernels.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
