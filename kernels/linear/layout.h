// Where things lie in a packed matrix: what cpu.h says, as sums. For every instruction set, so nothing but integers.
#pragma once

#include "cpu.h"

namespace appliance {

static inline int64_t pair_bytes(const Matrix &matrix) { // of the codes of two columns
    switch (matrix.codes) {
    case Codes::U4:
        return 16;
    case Codes::U8:
        return 32;
    case Codes::F16:
    case Codes::BF16:
        return 64;
    default:
        return 128;
    }
}

// The codes of so many columns (even) of a block.
static inline int64_t codes_bytes(const Matrix &matrix, int64_t columns) { return columns / 2 * pair_bytes(matrix); }

static inline int64_t scales_bytes(const Matrix &matrix) { // of a group
    switch (matrix.scales) {
    case Scales::NONE:
        return 0;
    case Scales::SUB:
        return kBlockRows;
    case Scales::F32:
        return 4 * kBlockRows;
    default:
        return 2 * kBlockRows;
    }
}

static inline int64_t offsets_bytes(const Matrix &matrix) { // of a group
    switch (matrix.offsets) {
    case Offsets::ZEROS:
        return kBlockRows;
    case Offsets::BIASES:
        return scales_bytes(matrix);
    default:
        return 0;
    }
}

static inline int64_t group_bytes(const Matrix &matrix) {
    return codes_bytes(matrix, matrix.group) + scales_bytes(matrix) + offsets_bytes(matrix);
}

static inline int64_t header_bytes(const Matrix &matrix) { // of a super-block
    return matrix.super ? (matrix.offsets == Offsets::BIASES ? 4 : 2) * kBlockRows : 0;
}

// Columns of a super-block; where there are none, all are one.
static inline int64_t super_columns(const Matrix &matrix) { return matrix.super ? matrix.super : matrix.columns; }

} // namespace appliance
