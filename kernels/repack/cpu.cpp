// Transposes of packed codes. What they wait for is memory: tiles read several neighbouring cache lines of a row at a
// time and write whole lines, by way of a buffer that stays in the cache whatever the rows' strides are.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../runtime/export.h"
#include "bits.h"

namespace {

using Word = std::uint32_t;
constexpr std::size_t kLine = 16; // words of a cache line
constexpr std::size_t kLineBytes = kLine * sizeof(Word);

typedef Word Quad __attribute__((vector_size(16)));
typedef Word Line __attribute__((vector_size(kLineBytes)));

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Quad{i, j, k, l})
#endif

inline Quad load(const Word *from) {
    Quad quad;
    std::memcpy(&quad, from, sizeof quad);
    return quad;
}

// out[c][r] = in[r][c] of a square of kLine words; rows of `in` are `stride` apart.
inline void transpose_square(const Word *in, std::size_t stride, Word out[kLine][kLine]) {
    for (std::size_t r = 0; r < kLine; r += 4)
        for (std::size_t c = 0; c < kLine; c += 4) {
            const Word *at = in + r * stride + c;
            const Quad a = load(at), b = load(at + stride), d = load(at + 2 * stride), e = load(at + 3 * stride);
            const Quad ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
            const Quad de_low = SHUFFLE(d, e, 0, 4, 1, 5), de_high = SHUFFLE(d, e, 2, 6, 3, 7);
            const Quad turned[4] = {SHUFFLE(ab_low, de_low, 0, 1, 4, 5), SHUFFLE(ab_low, de_low, 2, 3, 6, 7),
                                    SHUFFLE(ab_high, de_high, 0, 1, 4, 5), SHUFFLE(ab_high, de_high, 2, 3, 6, 7)};
            for (std::size_t i = 0; i < 4; ++i)
                std::memcpy(&out[c + i][r], &turned[i], sizeof(Quad));
        }
}

// One stage of the transpose of a matrix of nibbles (Hacker's Delight, 7-3): swaps the halves that `shift` and `mask`
// name between two words, for a line of words at once.
inline void swap_halves(Line &low, Line &high, int shift, Word mask) {
    const Line swapped = ((low >> shift) ^ high) & mask;
    high ^= swapped;
    low ^= swapped << shift;
}

// rows[k][m] holds nibble i of word m; afterwards rows[i][m] holds it as nibble k.
inline void transpose_nibble_squares(Line rows[8]) {
    for (int k = 0; k < 4; ++k)
        swap_halves(rows[k], rows[k + 4], 16, 0x0000FFFF);
    for (int k : {0, 1, 4, 5})
        swap_halves(rows[k], rows[k + 2], 8, 0x00FF00FF);
    for (int k : {0, 2, 4, 6})
        swap_halves(rows[k], rows[k + 1], 4, 0x0F0F0F0F);
}

// The inverse of `unpack`, of codes in another order.
void pack_gathered(const std::uint8_t *codes, const std::int64_t *from, std::uint8_t *packed, std::size_t count,
                   unsigned bits) {
    std::uint32_t held = 0;
    unsigned have = 0;
    for (std::size_t i = 0; i < count; ++i) {
        held |= std::uint32_t(codes[from[i]]) << have;
        have += bits;
        if (have >= 8) {
            *packed++ = std::uint8_t(held);
            held >>= 8;
            have -= 8;
        }
    }
    if (have > 0)
        *packed = std::uint8_t(held);
}

} // namespace

// out[c][r] = in[r][c].
APPLIANCE_EXPORT void appliance_transpose_words(const Word *in, Word *out, std::size_t rows, std::size_t columns) {
    constexpr std::size_t kWide = 8 * kLine;
    alignas(64) Word tile[kLine][kWide];
    alignas(64) Word turned[kLine][kLine];
    for (std::size_t c0 = 0; c0 < columns; c0 += kWide) {
        const std::size_t wide = std::min(kWide, columns - c0);
        for (std::size_t r0 = 0; r0 < rows; r0 += kLine) {
            const std::size_t high = std::min(kLine, rows - r0);
            for (std::size_t r = 0; r < high; ++r)
                std::memcpy(tile[r], in + (r0 + r) * columns + c0, wide * sizeof(Word));
            for (std::size_t c1 = 0; c1 < wide; c1 += kLine) {
                transpose_square(&tile[0][c1], kWide, turned);
                for (std::size_t c = c1; c < std::min(wide, c1 + kLine); ++c)
                    std::memcpy(out + (c0 + c) * rows + r0, turned[c - c1], high * sizeof(Word));
            }
        }
    }
}

// in: [rows][width] words; out: [width][8][rows / 8]. Nibble k % 8 of out[m][order[i]][k / 8] is nibble i of in[k][m].
APPLIANCE_EXPORT void appliance_transpose_nibbles(const Word *in, Word *out, std::size_t rows, std::size_t width,
                                                  const std::int32_t *order) {
    constexpr std::size_t kWide = 4 * kLine;
    const std::size_t octets = rows / 8;
    alignas(64) Word tile[8][kLine][kWide]; // [place][octet][word]
    alignas(64) Word turned[kLine][kLine];
    for (std::size_t m0 = 0; m0 < width; m0 += kWide) {
        const std::size_t wide = std::min(kWide, width - m0);
        for (std::size_t o0 = 0; o0 < octets; o0 += kLine) {
            const std::size_t high = std::min(kLine, octets - o0);
            for (std::size_t o = 0; o < high; ++o)
                for (std::size_t m1 = 0; m1 < wide; m1 += kLine) {
                    Line square[8];
                    for (std::size_t k = 0; k < 8; ++k) {
                        const Word *row = in + ((o0 + o) * 8 + k) * width + m0 + m1;
                        // Rows lie too far apart for the processor to see what comes next.
                        if (o0 + o + 1 < octets)
                            __builtin_prefetch(row + 8 * width);
                        if (wide - m1 >= kLine) {
                            std::memcpy(&square[k], row, kLineBytes);
                        } else {
                            square[k] = Line{};
                            std::memcpy(&square[k], row, (wide - m1) * sizeof(Word));
                        }
                    }
                    transpose_nibble_squares(square);
                    for (std::size_t i = 0; i < 8; ++i)
                        std::memcpy(&tile[order[i]][o][m1], &square[i], kLineBytes);
                }
            for (std::size_t m1 = 0; m1 < wide; m1 += kLine)
                for (std::size_t place = 0; place < 8; ++place) {
                    transpose_square(&tile[place][0][m1], kWide, turned);
                    for (std::size_t m = m1; m < std::min(wide, m1 + kLine); ++m)
                        std::memcpy(out + ((m0 + m) * 8 + place) * octets + o0, turned[m - m1], high * sizeof(Word));
                }
        }
    }
}

// In place, code j of each row becomes what code from[j] was; rows are bit streams of `row_bytes` bytes.
APPLIANCE_EXPORT void appliance_reorder_codes(std::uint8_t *packed, std::size_t rows, std::size_t row_bytes,
                                              const std::int64_t *from, std::size_t columns, unsigned bits) {
    std::vector<std::uint8_t> codes(columns + 8); // whole eights are unpacked
    for (std::size_t row = 0; row < rows; ++row) {
        std::uint8_t *stream = packed + row * row_bytes;
        appliance::unpack_of(int(bits))(stream, std::int64_t(columns), codes.data());
        pack_gathered(codes.data(), from, stream, columns, bits);
    }
}
