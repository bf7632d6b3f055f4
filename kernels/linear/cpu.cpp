#include "cpu.h"

#include "../runtime/simd.h"

namespace appliance::APPLIANCE_ISA {

extern const LinearKernels linear = {};

} // namespace appliance::APPLIANCE_ISA
