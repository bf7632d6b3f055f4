#pragma once

#include <cstdint>

namespace appliance {

struct Largest {
    float value;
    int64_t index; // the first of equal ones; -1 where one of all is not a finite number
};

// Of `count` values, at least one.
using Argmax = Largest (*)(const float *x, int64_t count);

} // namespace appliance
