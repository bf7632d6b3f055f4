#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

static void run(float *x, int heads, int head_dim, const float *cos, const float *sin, int half) {
    for (int head = 0; head < heads; ++head, x += head_dim)
        for (int i = 0; i < half; i += kLanes) {
            const int count = half - i < kLanes ? half - i : kLanes;
            const bool whole = count == kLanes;
            const Floats c = whole ? load(cos + i) : load_first(cos + i, count);
            const Floats s = whole ? load(sin + i) : load_first(sin + i, count);
            const Floats a = whole ? load(x + i) : load_first(x + i, count);
            const Floats b = whole ? load(x + half + i) : load_first(x + half + i, count);
            const Floats first = a * c - b * s, second = b * c + a * s;
            if (whole) {
                store(x + i, first);
                store(x + half + i, second);
            } else {
                store_first(x + i, first, count);
                store_first(x + half + i, second, count);
            }
        }
}

extern const Rope rope = run;

} // namespace appliance::APPLIANCE_ISA
