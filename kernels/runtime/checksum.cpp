// A checksum as fast as memory, against damage and not against malice.
#include <cstdint>
#include <cstring>

#include "export.h"

namespace {

constexpr int kLanes = 8; // so many products are on their way at once
constexpr uint64_t kOdd = 0x9E3779B185EBCA87u, kStart = 0xC2B2AE3D27D4EB4Fu;

// For a fixed word one to one in the state, and for a fixed state in the word: a changed word always changes the result.
inline uint64_t mix(uint64_t state, uint64_t word) {
    const uint64_t product = (state ^ word) * kOdd;
    return product << 31 | product >> 33;
}

} // namespace

// Of `bytes` bytes; the same on every instruction set, not on machines of another byte order.
APPLIANCE_EXPORT uint64_t appliance_checksum(const uint8_t *data, int64_t bytes) {
    uint64_t lanes[kLanes], words[kLanes];
    for (int i = 0; i < kLanes; ++i)
        lanes[i] = kStart + uint64_t(i);
    int64_t at = 0;
    for (; at + int64_t(sizeof words) <= bytes; at += sizeof words) {
        std::memcpy(words, data + at, sizeof words);
        for (int i = 0; i < kLanes; ++i)
            lanes[i] = mix(lanes[i], words[i]);
    }
    if (at < bytes) {
        std::memset(words, 0, sizeof words);
        std::memcpy(words, data + at, size_t(bytes - at));
        for (int i = 0; i < kLanes; ++i)
            lanes[i] = mix(lanes[i], words[i]);
    }
    uint64_t sum = uint64_t(bytes);
    for (uint64_t lane : lanes)
        sum = mix(sum, lane);
    return sum;
}
