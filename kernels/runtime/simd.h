// Sixteen lanes of numbers at once. Kernels are written once on these and compiled once for each instruction set: every
// translation unit that includes this is built with the flags of one of them and with APPLIANCE_ISA naming it.
//
// Nothing here has external linkage outside the namespace of its instruction set, and nothing of the standard library's
// templates is used by kernels: a template that two translation units share may be kept in its widest form, which a
// narrower machine cannot run.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace appliance {
constexpr int kLanes = 16;
}

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace appliance::APPLIANCE_ISA {

static inline void prefetch(const void *address) { __builtin_prefetch(address, 0, 3); }

// The first `count` lanes from memory, zeros beyond; nothing behind them is read.
static inline Floats load_first(const float *from, int count) {
    alignas(64) float lanes[kLanes] = {};
    std::memcpy(lanes, from, sizeof(float) * count);
    return load(lanes);
}

// The first `count` lanes to memory; nothing behind them is written.
static inline void store_first(float *to, Floats x, int count) {
    alignas(64) float lanes[kLanes];
    store(lanes, x);
    std::memcpy(to, lanes, sizeof(float) * count);
}

// e^x, within 2 units in the last place; x is bounded to -87.3 … 88, and not a number stays so.
static inline Floats exp(Floats x) {
    x = min(splat(88.0f), max(splat(-87.3f), x));
    const Floats n = round(x * splat(1.44269504088896341f));
    // ln 2 in two parts (Cephes, expf): the first has few enough digits that n times it is exact.
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return fma(p, r * r, r + splat(1.0f)) * power_of_two(n);
}

// tanh(x) by e^2x; not a number stays so.
static inline Floats tanh(Floats x) {
    return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

static inline uint16_t bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return uint16_t(bits >> 16 | 0x40); // not a number stays so
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

} // namespace appliance::APPLIANCE_ISA
