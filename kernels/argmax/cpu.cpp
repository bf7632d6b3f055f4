#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

static Largest run(const float *x, int64_t count) {
    // Nothing times a finite number is nothing, times another one not a number.
    Floats largest = splat(x[0]), nothing = splat(0.0f);
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Floats lanes = load(x + i);
        largest = max(lanes, largest);
        nothing = fma(lanes, splat(0.0f), nothing);
    }
    float value = reduce_max(largest), sum = reduce_add(nothing);
    for (int64_t i = whole; i < count; ++i) {
        value = x[i] > value ? x[i] : value;
        sum += x[i] * 0.0f;
    }
    if (sum != 0.0f)
        return {value, -1};
    int64_t index = 0;
    while (x[index] != value)
        ++index;
    return {value, index};
}

extern const Argmax argmax = run;

} // namespace appliance::APPLIANCE_ISA
