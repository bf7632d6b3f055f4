// What a matrix is packed from.
#pragma once

#include "cpu.h"

namespace appliance {

// Codes of `bits` bits as a stream of bits, least significant first, that starts anew with each row.
struct QuantisedSource {
    const uint8_t *codes; // [rows][ceil(columns · bits / 8)]
    int32_t bits;
    int32_t group;           // Matrix::group of the target is this or, with columns of zeros after each group, more
    int64_t columns;         // without padding
    const void *scales;      // [rows][groups], or of super-blocks fp16 [rows][super-blocks]
    const void *biases;      // likewise, or null
    const int8_t *sub_scales; // [rows][groups], or null
    const int8_t *sub_biases; // likewise
    const uint8_t *zeros;    // likewise
    const uint16_t *values;  // [2^bits], what is written for a code where the target holds 16-bit values; or null
};

} // namespace appliance
