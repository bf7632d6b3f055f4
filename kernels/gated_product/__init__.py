"""Product of an activated gate with another row."""

from appliance.kernels.gated_product.reference import clamped_swiglu_mul, gelu_mul, gelu_tanh_mul, silu_mul

__all__ = ["clamped_swiglu_mul", "gelu_mul", "gelu_tanh_mul", "silu_mul"]
