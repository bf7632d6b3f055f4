#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

static inline Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

static inline Floats erf(Floats x) {
    alignas(64) float lanes[kLanes];
    store(lanes, x);
    for (float &lane : lanes)
        lane = ::erff(lane);
    return load(lanes);
}

static inline Floats product(Activation activation, Floats alpha, Floats limit, Floats g, Floats u) {
    const Floats one = splat(1.0f), half = splat(0.5f);
    switch (activation) {
    case Activation::SILU:
        return g * sigmoid(g) * u;
    case Activation::GELU:
        return half * g * (one + erf(g * splat(0.70710678118654752f))) * u;
    case Activation::GELU_TANH: {
        const Floats inner = splat(0.79788456080286536f) * (g + splat(0.044715f) * g * g * g);
        return half * g * (one + tanh(inner)) * u;
    }
    case Activation::CLAMPED_SWIGLU:
        g = min(limit, g);
        u = max(splat(0.0f) - limit, min(limit, u));
        return g * sigmoid(alpha * g) * (u + one);
    }
    return u;
}

static void run(Activation activation, float alpha, float limit, const float *gate, const float *up, float *out,
                int64_t width) {
    const Floats a = splat(alpha), l = splat(limit);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        store(out + i, product(activation, a, l, load(gate + i), load(up + i)));
    if (const int rest = int(width - i); rest > 0)
        store_first(out + i, product(activation, a, l, load_first(gate + i, rest), load_first(up + i, rest)), rest);
}

extern const GatedProduct gated_product = run;

} // namespace appliance::APPLIANCE_ISA
