#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

static void run(const float *x, const float *weight, float *out, int64_t width, float eps) {
    Floats squares = splat(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Floats lanes = load(x + i);
        squares = fma(lanes, lanes, squares);
    }
    const int rest = int(width - i);
    if (rest) {
        const Floats lanes = load_first(x + i, rest);
        squares = fma(lanes, lanes, squares);
    }
    const Floats scale = splat(1.0f / std::sqrt(reduce_add(squares) / float(width) + eps));
    for (i = 0; i + kLanes <= width; i += kLanes)
        store(out + i, load(x + i) * scale * load(weight + i));
    if (rest)
        store_first(out + i, load_first(x + i, rest) * scale * load_first(weight + i, rest), rest);
}

extern const RmsNorm rms_norm = run;

} // namespace appliance::APPLIANCE_ISA
