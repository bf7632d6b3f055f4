#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

extern const AttentionKernels attention = {};

} // namespace appliance::APPLIANCE_ISA
