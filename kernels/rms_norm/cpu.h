#pragma once

#include <cstdint>

namespace appliance {

// out = x / sqrt(mean(x²) + eps) · weight, of one row; `out` may be `x`.
using RmsNorm = void (*)(const float *x, const float *weight, float *out, int64_t width, float eps);

} // namespace appliance
