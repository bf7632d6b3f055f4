// Transposes of packed codes, in tiles that read and write whole cache lines.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define APPLIANCE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::size_t kLine = 16; // words of a cache line

// One stage of the transpose of a matrix of nibbles (Hacker's Delight, 7-3): swaps the halves that `shift` and `mask`
// name between two words, for a line of words at once.
inline void swap_halves(std::uint32_t *low, std::uint32_t *high, unsigned shift, std::uint32_t mask) {
    for (std::size_t i = 0; i < kLine; ++i) {
        const std::uint32_t swapped = ((low[i] >> shift) ^ high[i]) & mask;
        high[i] ^= swapped;
        low[i] ^= swapped << shift;
    }
}

// rows[k] holds nibble i of word m in rows[k][m]; afterwards rows[i][m] holds it as nibble k.
inline void transpose_squares(std::uint32_t rows[8][kLine]) {
    for (int k = 0; k < 4; ++k)
        swap_halves(rows[k], rows[k + 4], 16, 0x0000FFFF);
    for (int k : {0, 1, 4, 5})
        swap_halves(rows[k], rows[k + 2], 8, 0x00FF00FF);
    for (int k : {0, 2, 4, 6})
        swap_halves(rows[k], rows[k + 1], 4, 0x0F0F0F0F);
}

// Bit streams, least significant bit first, of `count` codes.
void unpack(const std::uint8_t *packed, std::uint8_t *codes, std::size_t count, unsigned bits) {
    std::uint32_t held = 0, mask = (1u << bits) - 1;
    unsigned have = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (have < bits) {
            held |= std::uint32_t(*packed++) << have;
            have += 8;
        }
        codes[i] = held & mask;
        held >>= bits;
        have -= bits;
    }
}

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
APPLIANCE_EXPORT void appliance_transpose_words(const std::uint32_t *in, std::uint32_t *out, std::size_t rows,
                                                std::size_t columns) {
    constexpr std::size_t kWide = 4 * kLine;
    for (std::size_t c0 = 0; c0 < columns; c0 += kWide) {
        const std::size_t c1 = std::min(columns, c0 + kWide);
        for (std::size_t r0 = 0; r0 < rows; r0 += kLine) {
            const std::size_t r1 = std::min(rows, r0 + kLine);
            for (std::size_t c = c0; c < c1; ++c)
                for (std::size_t r = r0; r < r1; ++r)
                    out[c * rows + r] = in[r * columns + c];
        }
    }
}

// in: [rows][width] words; out: [width][8][rows / 8]. Nibble k % 8 of out[m][order[i]][k / 8] is nibble i of in[k][m].
APPLIANCE_EXPORT void appliance_transpose_nibbles(const std::uint32_t *in, std::uint32_t *out, std::size_t rows,
                                                  std::size_t width, const std::int32_t *order) {
    const std::size_t octets = rows / 8;
    std::uint32_t tile[kLine][8][kLine];
    for (std::size_t m0 = 0; m0 < width; m0 += kLine) {
        const std::size_t line = std::min(kLine, width - m0);
        for (std::size_t o0 = 0; o0 < octets; o0 += kLine) {
            const std::size_t some = std::min(kLine, octets - o0);
            for (std::size_t o = 0; o < some; ++o) {
                std::uint32_t square[8][kLine] = {};
                for (std::size_t k = 0; k < 8; ++k)
                    std::memcpy(square[k], in + ((o0 + o) * 8 + k) * width + m0, line * sizeof(std::uint32_t));
                transpose_squares(square);
                for (std::size_t i = 0; i < 8; ++i)
                    for (std::size_t m = 0; m < kLine; ++m)
                        tile[m][order[i]][o] = square[i][m];
            }
            for (std::size_t m = 0; m < line; ++m)
                for (std::size_t place = 0; place < 8; ++place)
                    std::memcpy(out + ((m0 + m) * 8 + place) * octets + o0, tile[m][place],
                                some * sizeof(std::uint32_t));
        }
    }
}

// In place, code j of each row becomes what code from[j] was; rows are bit streams of `row_bytes` bytes.
APPLIANCE_EXPORT void appliance_reorder_codes(std::uint8_t *packed, std::size_t rows, std::size_t row_bytes,
                                              const std::int64_t *from, std::size_t columns, unsigned bits) {
    std::vector<std::uint8_t> codes(columns);
    for (std::size_t row = 0; row < rows; ++row) {
        std::uint8_t *stream = packed + row * row_bytes;
        unpack(stream, codes.data(), columns, bits);
        pack_gathered(codes.data(), from, stream, columns, bits);
    }
}
