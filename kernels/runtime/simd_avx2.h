// The lanes of simd.h in two registers of AVX2 (with FMA and F16C; AVX-VNNI where the translation unit has it).
#pragma once

#include <immintrin.h>

namespace appliance::APPLIANCE_ISA {

constexpr bool kWide = false; // 16 registers of 8 lanes

struct Floats {
    __m256 a, b;
};
struct Ints {
    __m256i a, b;
};
struct Bytes {
    __m256i a, b;
};
struct Mask {
    __m256 a, b;
};

#define EACH(type, operation, x, y) type{operation(x.a, y.a), operation(x.b, y.b)}

static inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Floats load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
static inline void store(float *to, Floats x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
static inline Floats operator+(Floats x, Floats y) { return EACH(Floats, _mm256_add_ps, x, y); }
static inline Floats operator-(Floats x, Floats y) { return EACH(Floats, _mm256_sub_ps, x, y); }
static inline Floats operator*(Floats x, Floats y) { return EACH(Floats, _mm256_mul_ps, x, y); }
static inline Floats operator/(Floats x, Floats y) { return EACH(Floats, _mm256_div_ps, x, y); }
static inline Floats fma(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// Of both: the second where one is not a number.
static inline Floats max(Floats x, Floats y) { return EACH(Floats, _mm256_max_ps, x, y); }
static inline Floats min(Floats x, Floats y) { return EACH(Floats, _mm256_min_ps, x, y); }
// To the nearest whole number, halves to the even one.
static inline Floats round(Floats x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
static inline float reduce_add(Floats x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
static inline float reduce_max(Floats x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

static inline Ints splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Ints load(const int32_t *from) {
    return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 8))};
}
static inline void store(int32_t *to, Ints x) {
    _mm256_storeu_si256((__m256i *)to, x.a);
    _mm256_storeu_si256((__m256i *)(to + 8), x.b);
}
static inline Ints operator+(Ints x, Ints y) { return EACH(Ints, _mm256_add_epi32, x, y); }
static inline Ints operator&(Ints x, Ints y) { return EACH(Ints, _mm256_and_si256, x, y); }
static inline Ints max(Ints x, Ints y) { return EACH(Ints, _mm256_max_epi32, x, y); }
static inline Ints shift_left(Ints x, int bits) {
    return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
}
// Zeros come in.
static inline Ints shift_right(Ints x, int bits) {
    return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
}
static inline int32_t reduce_add(Ints x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
static inline int32_t reduce_max(Ints x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

static inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
// To nearest, halves to even.
static inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline Ints as_ints(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
// n whole, in -126 … 127.
static inline Floats power_of_two(Floats n) {
    return as_floats(shift_left(to_ints(n) + splat(int32_t(127)), 23));
}

static inline Mask less(Ints x, Ints y) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b))};
}
static inline Mask less(Floats x, Floats y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
static inline Mask operator|(Mask x, Mask y) { return EACH(Mask, _mm256_or_ps, x, y); }
static inline Floats select(Mask mask, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b)};
}

// Sixteen values of other types in memory.
static inline Floats load_half(const void *from) {
    const __m128i *at = static_cast<const __m128i *>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
static inline Floats load_bf16(const void *from) {
    const __m128i *at = static_cast<const __m128i *>(from);
    const Ints wide{_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
    return as_floats(shift_left(wide, 16));
}
static inline Ints load_int8(const void *from) {
    const __m128i all = _mm_loadu_si128(static_cast<const __m128i *>(from));
    return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
static inline Ints load_uint8(const void *from) {
    const __m128i all = _mm_loadu_si128(static_cast<const __m128i *>(from));
    return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
// Each in -128 … 127.
static inline void store_int8(void *to, Ints x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(static_cast<__m128i *>(to), bytes);
}

static inline Bytes load_bytes(const void *from) {
    const __m256i *at = static_cast<const __m256i *>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
static inline Ints as_ints(Bytes x) { return {x.a, x.b}; }
static inline Bytes low_nibbles(Bytes x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
static inline Bytes high_nibbles(Bytes x) {
    return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// table[x] of 16 entries; x in 0 … 15.
static inline Bytes look_up(const uint8_t *table, Bytes x) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
}

#undef EACH

// Sums of products of four unsigned bytes of a lane with four signed ones, the same for all lanes. `Bits` is what the
// unsigned ones hold at most.
#if defined(__AVXVNNI__)
template <int Bits> struct Dots {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    inline void add(Bytes x, int32_t four) {
        const __m256i y = _mm256_set1_epi32(four);
        a = _mm256_dpbusd_avx_epi32(a, x.a, y);
        b = _mm256_dpbusd_avx_epi32(b, x.b, y);
    }
    inline Ints sum() const { return {a, b}; }
};
#else
template <int Bits> struct Dots;

// Pairs of products stay in 16 bits: 8 times 2 · 15 · 127 fit, so no more than that may be added.
template <> struct Dots<4> {
    __m256i a = _mm256_setzero_si256(), b = _mm256_setzero_si256();
    inline void add(Bytes x, int32_t four) {
        const __m256i y = _mm256_set1_epi32(four);
        a = _mm256_add_epi16(a, _mm256_maddubs_epi16(x.a, y));
        b = _mm256_add_epi16(b, _mm256_maddubs_epi16(x.b, y));
    }
    inline Ints sum() const {
        const __m256i one = _mm256_set1_epi16(1);
        return {_mm256_madd_epi16(a, one), _mm256_madd_epi16(b, one)};
    }
};

// A pair of products of whole bytes overflows 16 bits: nibbles by themselves, the high ones counting sixteenfold.
template <> struct Dots<8> {
    Dots<4> low, high;
    inline void add(Bytes x, int32_t four) {
        low.add(low_nibbles(x), four);
        high.add(high_nibbles(x), four);
    }
    inline Ints sum() const { return low.sum() + shift_left(high.sum(), 4); }
};
#endif

} // namespace appliance::APPLIANCE_ISA
