#pragma once

#include <cstdint>

namespace appliance {

// Rotates the first 2 · half elements of each of `heads` heads in place, element i with i + half.
// cos, sin: [half], at the row's position; heads lie head_dim apart.
using Rope = void (*)(float *x, int heads, int head_dim, const float *cos, const float *sin, int half);

} // namespace appliance
