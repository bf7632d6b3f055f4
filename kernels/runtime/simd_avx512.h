// The lanes of simd.h in one register of AVX-512 (F, BW, VL, DQ, VNNI; BF16 where the translation unit has it).
#pragma once

#include <immintrin.h>

namespace appliance::APPLIANCE_ISA {

constexpr bool kWide = true; // 32 registers of 16 lanes

struct Floats {
    __m512 v;
};
struct Ints {
    __m512i v;
};
struct Bytes {
    __m512i v;
};
struct Mask {
    __mmask16 v;
};

static inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Floats load(const float *from) { return {_mm512_loadu_ps(from)}; }
static inline void store(float *to, Floats x) { _mm512_storeu_ps(to, x.v); }
static inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of both: b where one is not a number.
static inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
// To the nearest whole number, halves to the even one.
static inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
static inline float reduce_add(Floats a) { return _mm512_reduce_add_ps(a.v); }
static inline float reduce_max(Floats a) { return _mm512_reduce_max_ps(a.v); }

static inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline Ints load(const int32_t *from) { return {_mm512_loadu_si512(from)}; }
static inline void store(int32_t *to, Ints x) { _mm512_storeu_si512(to, x.v); }
static inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Ints operator&(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
static inline Ints shift_left(Ints a, int bits) { return {_mm512_slli_epi32(a.v, bits)}; }
static inline Ints shift_right(Ints a, int bits) { return {_mm512_srli_epi32(a.v, bits)}; } // zeros come in
static inline int32_t reduce_add(Ints a) { return _mm512_reduce_add_epi32(a.v); }
static inline int32_t reduce_max(Ints a) { return _mm512_reduce_max_epi32(a.v); }

static inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; } // to nearest, halves to even
static inline Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
static inline Ints as_ints(Floats a) { return {_mm512_castps_si512(a.v)}; }
static inline Floats power_of_two(Floats n) { return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), n.v)}; }

static inline Mask less(Ints a, Ints b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
static inline Mask less(Floats a, Floats b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
static inline Mask operator|(Mask a, Mask b) { return {__mmask16(a.v | b.v)}; }
static inline Floats select(Mask mask, Floats yes, Floats no) { return {_mm512_mask_blend_ps(mask.v, no.v, yes.v)}; }

// Sixteen values of other types in memory.
static inline Floats load_half(const void *from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(from)))};
}
static inline Floats load_bf16(const void *from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline Ints load_int8(const void *from) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(from)))};
}
static inline Ints load_uint8(const void *from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(from)))};
}
// Each in -128 … 127.
static inline void store_int8(void *to, Ints x) {
    _mm_storeu_si128(static_cast<__m128i *>(to), _mm512_cvtepi32_epi8(x.v));
}

#if defined(__AVX512BF16__)
// sum + pairs of bfloat16 of each lane · one such pair, the same for all lanes.
static inline Floats dot_bf16(Floats sum, Bytes pairs, uint32_t pair) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)pairs.v, (__m512bh)_mm512_set1_epi32(int32_t(pair)))};
}
static inline void store_bf16(void *to, Floats x) {
    _mm256_storeu_si256(static_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(x.v));
}
#endif

static inline Bytes load_bytes(const void *from) { return {_mm512_loadu_si512(from)}; }
static inline Ints as_ints(Bytes a) { return {a.v}; }
static inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline Bytes high_nibbles(Bytes a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// table[a] of 16 entries; a in 0 … 15.
static inline Bytes look_up(const uint8_t *table, Bytes a) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), a.v)};
}

// Sums of products of four unsigned bytes of a lane with four signed ones, the same for all lanes. `Bits` is what the
// unsigned ones hold at most.
template <int Bits> struct Dots {
    __m512i v = _mm512_setzero_si512();
    inline void add(Bytes a, int32_t four) { v = _mm512_dpbusd_epi32(v, a.v, _mm512_set1_epi32(four)); }
    inline Ints sum() const { return {v}; }
};

} // namespace appliance::APPLIANCE_ISA
