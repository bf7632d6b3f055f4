// The lanes of simd.h in plain C++, for machines without AVX2 and for other architectures; right, not fast.
#pragma once

namespace appliance::APPLIANCE_ISA {

constexpr bool kWide = false;

struct Floats {
    float v[kLanes];
};
struct Ints {
    int32_t v[kLanes];
};
struct Bytes {
    uint8_t v[4 * kLanes];
};
struct Mask {
    bool v[kLanes];
};

#define LANES(type, expression)                                                                                        \
    type out;                                                                                                          \
    for (int i = 0; i < kLanes; ++i)                                                                                   \
        out.v[i] = expression;                                                                                         \
    return out

static inline Floats splat(float x) { LANES(Floats, x); }
static inline Floats load(const float *from) { LANES(Floats, from[i]); }
static inline void store(float *to, Floats x) { std::memcpy(to, x.v, sizeof x.v); }
static inline Floats operator+(Floats a, Floats b) { LANES(Floats, a.v[i] + b.v[i]); }
static inline Floats operator-(Floats a, Floats b) { LANES(Floats, a.v[i] - b.v[i]); }
static inline Floats operator*(Floats a, Floats b) { LANES(Floats, a.v[i] * b.v[i]); }
static inline Floats operator/(Floats a, Floats b) { LANES(Floats, a.v[i] / b.v[i]); }
static inline Floats fma(Floats a, Floats b, Floats c) { LANES(Floats, a.v[i] * b.v[i] + c.v[i]); }
// Of both: b where one is not a number.
static inline Floats max(Floats a, Floats b) { LANES(Floats, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline Floats min(Floats a, Floats b) { LANES(Floats, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// To the nearest whole number, halves to the even one.
static inline Floats round(Floats a) { LANES(Floats, std::nearbyintf(a.v[i])); }
static inline float reduce_add(Floats a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            a.v[i] += a.v[i + half];
    return a.v[0];
}
static inline float reduce_max(Floats a) {
    for (int i = 1; i < kLanes; ++i)
        a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
    return a.v[0];
}

static inline Ints splat(int32_t x) { LANES(Ints, x); }
static inline Ints load(const int32_t *from) { LANES(Ints, from[i]); }
static inline void store(int32_t *to, Ints x) { std::memcpy(to, x.v, sizeof x.v); }
static inline Ints operator+(Ints a, Ints b) { LANES(Ints, a.v[i] + b.v[i]); }
static inline Ints operator&(Ints a, Ints b) { LANES(Ints, a.v[i] & b.v[i]); }
static inline Ints max(Ints a, Ints b) { LANES(Ints, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline Ints shift_left(Ints a, int bits) { LANES(Ints, int32_t(uint32_t(a.v[i]) << bits)); }
static inline Ints shift_right(Ints a, int bits) { LANES(Ints, int32_t(uint32_t(a.v[i]) >> bits)); } // zeros come in
static inline int32_t reduce_add(Ints a) {
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i)
        sum += a.v[i];
    return sum;
}
static inline int32_t reduce_max(Ints a) {
    for (int i = 1; i < kLanes; ++i)
        a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
    return a.v[0];
}

static inline Floats to_floats(Ints a) { LANES(Floats, float(a.v[i])); }
// To nearest, halves to even; what is not a number becomes the least one.
static inline Ints to_ints(Floats a) {
    LANES(Ints, a.v[i] > -2147483648.0f && a.v[i] < 2147483648.0f ? int32_t(std::lrintf(a.v[i])) : INT32_MIN);
}
static inline Floats as_floats(Ints a) {
    Floats out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
static inline Ints as_ints(Floats a) {
    Ints out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
// n whole, in -126 … 127.
static inline Floats power_of_two(Floats n) { return as_floats(shift_left(to_ints(n) + splat(int32_t(127)), 23)); }

static inline Mask less(Ints a, Ints b) { LANES(Mask, a.v[i] < b.v[i]); }
static inline Mask less(Floats a, Floats b) { LANES(Mask, a.v[i] < b.v[i]); }
static inline Mask operator|(Mask a, Mask b) { LANES(Mask, a.v[i] || b.v[i]); }
static inline Floats select(Mask mask, Floats yes, Floats no) { LANES(Floats, mask.v[i] ? yes.v[i] : no.v[i]); }

static inline float half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    uint32_t wide;
    if (exponent == 0) {
        const float tiny = float(mantissa) * 5.9604644775390625e-8f; // 2^-24
        return sign ? -tiny : tiny;
    }
    wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}
// Sixteen values of other types in memory.
static inline Floats load_half(const void *from) {
    uint16_t bits[kLanes];
    std::memcpy(bits, from, sizeof bits);
    LANES(Floats, half(bits[i]));
}
static inline Floats load_bf16(const void *from) {
    uint16_t bits[kLanes];
    std::memcpy(bits, from, sizeof bits);
    Ints wide;
    for (int i = 0; i < kLanes; ++i)
        wide.v[i] = int32_t(uint32_t(bits[i]) << 16);
    return as_floats(wide);
}
static inline Ints load_int8(const void *from) { LANES(Ints, static_cast<const int8_t *>(from)[i]); }
static inline Ints load_uint8(const void *from) { LANES(Ints, static_cast<const uint8_t *>(from)[i]); }
// Each in -128 … 127; others are bounded to that.
static inline void store_int8(void *to, Ints x) {
    for (int i = 0; i < kLanes; ++i)
        static_cast<int8_t *>(to)[i] = int8_t(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
}

static inline Bytes load_bytes(const void *from) {
    Bytes out;
    std::memcpy(out.v, from, sizeof out.v);
    return out;
}
static inline Ints as_ints(Bytes a) {
    Ints out;
    std::memcpy(out.v, a.v, sizeof out.v);
    return out;
}
static inline Bytes low_nibbles(Bytes a) {
    for (uint8_t &byte : a.v)
        byte &= 15;
    return a;
}
static inline Bytes high_nibbles(Bytes a) {
    for (uint8_t &byte : a.v)
        byte >>= 4;
    return a;
}
// table[a] of 16 entries; a in 0 … 15.
static inline Bytes look_up(const uint8_t *table, Bytes a) {
    for (uint8_t &byte : a.v)
        byte = table[byte];
    return a;
}

#undef LANES

// Sums of products of four unsigned bytes of a lane with four signed ones, the same for all lanes. `Bits` is what the
// unsigned ones hold at most.
template <int Bits> struct Dots {
    int32_t v[kLanes] = {};
    inline void add(Bytes a, int32_t four) {
        int8_t signed_bytes[4];
        std::memcpy(signed_bytes, &four, sizeof four);
        for (int i = 0; i < kLanes; ++i)
            for (int j = 0; j < 4; ++j)
                v[i] += int32_t(a.v[4 * i + j]) * signed_bytes[j];
    }
    inline Ints sum() const {
        Ints out;
        std::memcpy(out.v, v, sizeof v);
        return out;
    }
};

} // namespace appliance::APPLIANCE_ISA
