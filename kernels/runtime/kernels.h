// The kernels of one instruction set, and which are used on this machine.
#pragma once

#include "../argmax/cpu.h"
#include "../gated_product/cpu.h"
#include "../linear/cpu.h"
#include "../paged_attention/cpu.h"
#include "../rms_norm/cpu.h"
#include "../rope/cpu.h"

namespace appliance {

struct Kernels {
    const char *isa;
    bool (*supported)();
    const LinearKernels *linear;
    const AttentionKernels *attention;
    const RmsNorm *rms_norm;
    const Rope *rope;
    const GatedProduct *gated_product;
    const Argmax *argmax;
};

// The widest set that this machine supports, or the one named by `appliance_force_isa`.
const Kernels &kernels();

} // namespace appliance
