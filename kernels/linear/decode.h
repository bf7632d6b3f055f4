// What a record holds, as floats.
#pragma once

#include "../runtime/simd.h"
#include "layout.h"

namespace appliance::APPLIANCE_ISA {

// Scale and bias of a group of 16 rows: weight = code · scale + bias.
struct Pair {
    Floats scale, bias;
};

static inline Floats load_numbers(Scales type, const uint8_t *at) {
    switch (type) {
    case Scales::F16:
        return load_half(at);
    case Scales::BF16:
        return load_bf16(at);
    case Scales::F32:
        return load(reinterpret_cast<const float *>(at));
    case Scales::SUB:
        return to_floats(load_int8(at));
    default:
        return splat(1.0f);
    }
}

// Scale and offset as they are kept: the offset a constant, a zero point or a bias.
static inline Pair load_pair(const Matrix &matrix, const uint8_t *header, const uint8_t *at) {
    Pair pair;
    pair.scale = load_numbers(matrix.scales, at);
    at += scales_bytes(matrix);
    switch (matrix.offsets) {
    case Offsets::ZEROS:
        pair.bias = to_floats(load_uint8(at));
        break;
    case Offsets::BIASES:
        pair.bias = load_numbers(matrix.scales, at);
        break;
    default:
        pair.bias = splat(matrix.constant);
    }
    if (matrix.super) {
        pair.scale = pair.scale * load_half(header);
        if (matrix.offsets == Offsets::BIASES)
            pair.bias = pair.bias * load_half(header + 2 * kBlockRows);
    }
    return pair;
}

// The same as a sum of products wants it. A zero point times a scale of 16 bits is exact.
static inline Pair bias_pair(const Matrix &matrix, const uint8_t *header, const uint8_t *at) {
    Pair pair = load_pair(matrix, header, at);
    if (matrix.offsets != Offsets::BIASES)
        pair.bias = (splat(0.0f) - pair.bias) * pair.scale;
    return pair;
}

// table[code] of `columns` columns of a block, to[column][row]. Columns start at a whole line of codes.
static void decode_codes(const Matrix &matrix, const uint8_t *from, int64_t columns, float *to) {
    switch (matrix.codes) {
    case Codes::U4:
        for (int64_t column = 0; column < columns; column += 8, from += 64) {
            const Bytes line = load_bytes(from);
            Bytes low = low_nibbles(line), high = high_nibbles(line);
            if (matrix.has_table)
                low = look_up(matrix.table, low), high = look_up(matrix.table, high);
            for (int half = 0; half < 2; ++half) {
                const Ints bytes = as_ints(half ? high : low);
                for (int i = 0; i < 4; ++i, to += kLanes)
                    store(to, to_floats(shift_right(bytes, 8 * i) & splat(int32_t(255))));
            }
        }
        break;
    case Codes::U8:
        for (int64_t column = 0; column < columns; column += 4, from += 64) {
            const Ints bytes = as_ints(load_bytes(from));
            for (int i = 0; i < 4; ++i, to += kLanes)
                store(to, to_floats(shift_right(bytes, 8 * i) & splat(int32_t(255))));
        }
        break;
    case Codes::F16:
        for (int64_t column = 0; column < columns; ++column, from += 2 * kLanes, to += kLanes)
            store(to, load_half(from));
        break;
    case Codes::BF16:
        for (int64_t column = 0; column < columns; ++column, from += 2 * kLanes, to += kLanes)
            store(to, load_bf16(from));
        break;
    case Codes::F32:
        std::memcpy(to, from, sizeof(float) * kLanes * columns);
    }
}

} // namespace appliance::APPLIANCE_ISA
