// Chooses, once and at run time, which instruction set's kernels are used.
#include "kernels.h"

#include <atomic>
#include <cstring>

#include "export.h"

#define DECLARE(isa)                                                                                                   \
    namespace appliance::isa {                                                                                         \
    extern const LinearKernels linear;                                                                                 \
    extern const AttentionKernels attention;                                                                           \
    extern const RmsNorm rms_norm;                                                                                     \
    extern const Rope rope;                                                                                            \
    extern const GatedProduct gated_product;                                                                           \
    extern const Argmax argmax;                                                                                        \
    }
#define KERNELS(isa, supported)                                                                                        \
    Kernels { #isa, supported, &isa::linear, &isa::attention, &isa::rms_norm, &isa::rope, &isa::gated_product, &isa::argmax }

DECLARE(portable)
#if defined(APPLIANCE_X86)
DECLARE(avx2)
#if defined(APPLIANCE_HAS_AVXVNNI)
DECLARE(avxvnni)
#endif
DECLARE(avx512vnni)
DECLARE(avx512bf16)
#endif

namespace appliance {
namespace {

#if defined(APPLIANCE_X86)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

// The widest first.
const Kernels kAll[] = {
#if defined(APPLIANCE_X86)
    KERNELS(avx512bf16, [] { return has_avx512vnni() && bool(__builtin_cpu_supports("avx512bf16")); }),
    KERNELS(avx512vnni, has_avx512vnni),
#if defined(APPLIANCE_HAS_AVXVNNI)
    KERNELS(avxvnni, [] { return has_avx2() && bool(__builtin_cpu_supports("avxvnni")); }),
#endif
    KERNELS(avx2, has_avx2),
#endif
    KERNELS(portable, [] { return true; }),
};

const Kernels *widest() {
#if defined(APPLIANCE_X86)
    __builtin_cpu_init();
#endif
    const Kernels *each = kAll;
    while (!each->supported())
        ++each;
    return each;
}

std::atomic<const Kernels *> chosen{nullptr};

} // namespace

const Kernels &kernels() {
    const Kernels *now = chosen.load(std::memory_order_relaxed);
    if (!now) {
        now = widest();
        chosen.store(now, std::memory_order_relaxed);
    }
    return *now;
}

} // namespace appliance

using namespace appliance;

// The instruction set whose kernels are used: a static, zero-terminated name.
APPLIANCE_EXPORT const char *appliance_isa(void) { return kernels().isa; }

// Use another one from now on, for tests; "" for the widest. Returns 0 where this machine or build hasn't it.
APPLIANCE_EXPORT int appliance_force_isa(const char *name) {
    if (!*name) {
        chosen.store(widest(), std::memory_order_relaxed);
        return 1;
    }
    for (const Kernels &each : kAll)
        if (!std::strcmp(each.isa, name) && each.supported()) {
            chosen.store(&each, std::memory_order_relaxed);
            return 1;
        }
    return 0;
}
