"""Product of an activated gate with another row."""

from appliance.kernels.gated_product.reference import clamped_swiglu_mul, gelu_mul, gelu_tanh_mul, silu_mul

# By these names natively and on the GPU; the order is that of `enum class Activation` (cpu.h).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")

__all__ = ["ACTIVATIONS", "clamped_swiglu_mul", "gelu_mul", "gelu_tanh_mul", "silu_mul"]
