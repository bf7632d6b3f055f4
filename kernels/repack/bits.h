// Codes of 1 to 8 bits out of streams of bits, the least significant first.
#pragma once

#include <cstdint>
#include <cstring>

namespace appliance {

// `width` ones every so many bits.
constexpr uint64_t repeated(int width, int every) {
    uint64_t pattern = 0;
    for (int at = 0; at < 64; at += every)
        pattern |= ((uint64_t(1) << width) - 1) << at;
    return pattern;
}

// Between the two halves of every `2 * apart` bits, the gap that opens where codes become bytes.
template <int Bits, int Apart> inline uint64_t opened(uint64_t x) {
    constexpr int width = Apart / 8 * Bits;
    constexpr uint64_t low = repeated(width, 2 * Apart), high = low << width;
    return (x & low) | (x & high) << (Apart - width);
}

// One code a byte; `to` has room for a multiple of eight.
template <int Bits> inline void unpack(const uint8_t *from, int64_t columns, uint8_t *to) {
    int64_t left = (columns * Bits + 7) / 8;
    for (int64_t column = 0; column < columns; column += 8, from += Bits, left -= Bits) {
        uint64_t eight = 0;
        if (left >= 8)
            std::memcpy(&eight, from, 8);
        else
            std::memcpy(&eight, from, size_t(left));
        if (Bits < 8)
            eight = opened<Bits, 8>(opened<Bits, 16>(opened<Bits, 32>(eight & repeated(8 * Bits % 64, 64))));
        std::memcpy(to + column, &eight, 8);
    }
}

typedef void (*Unpack)(const uint8_t *, int64_t, uint8_t *);

inline Unpack unpack_of(int bits) {
    switch (bits) {
    case 1:
        return unpack<1>;
    case 2:
        return unpack<2>;
    case 3:
        return unpack<3>;
    case 4:
        return unpack<4>;
    case 5:
        return unpack<5>;
    case 6:
        return unpack<6>;
    case 7:
        return unpack<7>;
    default:
        return unpack<8>;
    }
}

} // namespace appliance
