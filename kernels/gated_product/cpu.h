#pragma once

#include <cstdint>

namespace appliance {

// CLAMPED_SWIGLU: g / (1 + exp(-alpha · g)) · (u + 1), g = min(gate, limit), u between -limit and limit.
enum class Activation : int32_t { SILU, GELU, GELU_TANH, CLAMPED_SWIGLU };

// out = activation(gate) · up, of one row.
using GatedProduct = void (*)(Activation activation, float alpha, float limit, const float *gate, const float *up,
                              float *out, int64_t width);

} // namespace appliance
