// Which instruction sets this machine offers, asked once by the Python side (kernels/native.py).

#define APPLIANCE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const char *detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512vnni"))
        return __builtin_cpu_supports("avx512bf16") ? "avx512-vnni-bf16" : "avx512-vnni";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return "avx2";
    return "x86-64";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "generic";
#endif
}

} // namespace

// The widest instruction set that kernels may use here: a static, zero-terminated name.
APPLIANCE_EXPORT const char *appliance_isa(void) {
    static const char *const name = detect();
    return name;
}
