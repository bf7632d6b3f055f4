// Products of a few rows of activations with a piece of a block: what is compiled for each number of rows.
#pragma once

#include "decode.h"

namespace appliance::APPLIANCE_ISA {

constexpr int kTileRows = kWide ? 12 : 4;
// Loops over lines and rows are unrolled where lanes are registers; else there's more to compile than to gain.
#if defined(__AVX2__)
constexpr int kUnroll = 16;
#else
constexpr int kUnroll = 1;
#endif
// A piece of a block: so many columns at most, either of one group or whole groups.
constexpr int kPieceColumns = 256;
constexpr int kPieceGroups = kPieceColumns / 16;

struct Piece {
    int64_t first_column;
    int groups;
    int chunks;                             // of a group
    int half_chunks;                        // of 16 columns in a chunk
    const uint8_t *codes;                   // of the first group
    int64_t group_bytes;                    // from one group's codes to the next's
    alignas(64) float scales[kPieceGroups][2][kLanes]; // scale and bias
};

typedef float Sums[kTileRows][kLanes];

// Rows of something, each `stride` from the one before. Few addresses are kept, as there are few registers: a row's is a
// small multiple of the stride away from one of them.
template <typename T, int Rows> struct RowsOf {
    const T *first[(Rows + 3) / 4];
    int64_t stride;

    inline RowsOf(const T *row, int64_t stride) : stride(stride) {
        for (int i = 0; i < (Rows + 3) / 4; ++i)
            first[i] = row + 4 * i * stride;
    }
    inline const T *operator[](int row) const { return first[row / 4] + (row % 4) * stride; }
    inline void advance(int64_t by) {
        for (const T *&each : first)
            each += by;
    }
};

static inline int32_t load_four(const int8_t *from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return four;
}

// sums[row][n] += products of the piece, the integers of a chunk first; so a row's sums don't depend on `Rows`.
template <int Rows, int Bits, bool Table, int HalfChunks>
static void multiply_codes_of(const Matrix &matrix, const Piece &piece, const Panel &panel, int64_t row, Sums &sums) {
    RowsOf<int8_t, Rows> x(panel.codes + row * panel.codes_stride + piece.first_column, panel.codes_stride);
    RowsOf<float, Rows> x_sums(panel.sums + row * panel.sums_stride +
                                   piece.first_column / (16 * HalfChunks),
                               panel.sums_stride);
    RowsOf<float, Rows> x_scales(panel.scales + row * panel.scales_stride, panel.scales_stride);
    Floats f[Rows];
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        f[m] = load(sums[m]);
    int64_t column = piece.first_column;
    const uint8_t *group = piece.codes;
    for (int g = 0; g < piece.groups; ++g, group += piece.group_bytes) {
        const uint8_t *line = group;
        const Floats scale = load(piece.scales[g][0]), bias = load(piece.scales[g][1]);
        for (int c = 0; c < piece.chunks; ++c) {
            Dots<Table ? 8 : Bits> dots[Rows]; // a table has whole bytes
#pragma GCC unroll kUnroll
            for (int half = 0; half < HalfChunks; ++half) {
#pragma GCC unroll kUnroll
                for (int quad = 0; quad < 4; quad += Bits == 4 ? 2 : 1, line += 64) {
                    if (Rows <= 4)
                        prefetch(line + 4096);
                    const Bytes all = load_bytes(line);
                    Bytes low = Bits == 4 ? low_nibbles(all) : all;
                    if (Table)
                        low = look_up(matrix.table, low);
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m)
                        dots[m].add(low, load_four(x[m] + 4 * quad));
                    if (Bits == 4) {
                        Bytes high = high_nibbles(all);
                        if (Table)
                            high = look_up(matrix.table, high);
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m)
                            dots[m].add(high, load_four(x[m] + 4 * quad + 4));
                    }
                }
                x.advance(16);
            }
            const int64_t at = column / kActivationGroup;
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m) {
                f[m] = fma(to_floats(dots[m].sum()), scale * splat(x_scales[m][at]), f[m]);
                f[m] = fma(bias, splat(*x_sums[m]), f[m]);
            }
            x_sums.advance(1);
            column += 16 * HalfChunks;
        }
    }
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        store(sums[m], f[m]);
}

template <int Rows, int Bits, bool Table>
static void multiply_codes(const Matrix &matrix, const Piece &piece, const Panel &panel, int64_t row, Sums &sums) {
    if (piece.half_chunks == 2)
        multiply_codes_of<Rows, Bits, Table, 2>(matrix, piece, panel, row, sums);
    else
        multiply_codes_of<Rows, Bits, Table, 1>(matrix, piece, panel, row, sums);
}

// The same with activations and weights in floating point: `weights` is the piece's table[code], [column][row].
template <int Rows>
static void multiply_values(const Piece &piece, const float *weights, const Panel &panel, int64_t row, Sums &sums) {
    RowsOf<float, Rows> x(panel.values + row * panel.values_stride + piece.first_column, panel.values_stride);
    RowsOf<float, Rows> x_sums(panel.sums + row * panel.sums_stride +
                                   piece.first_column / (16 * piece.half_chunks),
                               panel.sums_stride);
    Floats f[Rows];
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        f[m] = load(sums[m]);
    for (int g = 0; g < piece.groups; ++g) {
        const Floats scale = load(piece.scales[g][0]), bias = load(piece.scales[g][1]);
        for (int c = 0; c < piece.chunks; ++c) {
            // Chunks don't wait for each other: that is enough to keep the processor busy even with one row.
            Floats dots[Rows];
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m)
                dots[m] = splat(0.0f);
            for (int half = 0; half < piece.half_chunks; ++half) {
#pragma GCC unroll kUnroll
                for (int column = 0; column < 16; ++column, weights += kLanes) {
                    const Floats weight = load(weights);
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m)
                        dots[m] = fma(weight, splat(x[m][column]), dots[m]);
                }
                x.advance(16);
            }
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m) {
                f[m] = fma(dots[m], scale, f[m]);
                f[m] = fma(bias, splat(*x_sums[m]), f[m]);
            }
            x_sums.advance(1);
        }
    }
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        store(sums[m], f[m]);
}

typedef void (*MultiplyCodes)(const Matrix &, const Piece &, const Panel &, int64_t row, Sums &);
typedef void (*MultiplyValues)(const Piece &, const float *weights, const Panel &, int64_t row, Sums &);

#if defined(__AVX512VNNI__)
#define FOR_EACH_ROWS(f)                                                                                               \
    { f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12) }
#else
#define FOR_EACH_ROWS(f)                                                                                               \
    { f(1), f(2), f(3), f(4) }
#endif
#define NIBBLES(rows) multiply_codes<rows, 4, false>
#define TABLE(rows) multiply_codes<rows, 4, true>
#define BYTES(rows) multiply_codes<rows, 8, false>
#define VALUES(rows) multiply_values<rows>

static const MultiplyCodes kNibbles[kTileRows] = FOR_EACH_ROWS(NIBBLES);
static const MultiplyCodes kTable[kTileRows] = FOR_EACH_ROWS(TABLE);
static const MultiplyCodes kBytes[kTileRows] = FOR_EACH_ROWS(BYTES);
static const MultiplyValues kValues[kTileRows] = FOR_EACH_ROWS(VALUES);

#undef FOR_EACH_ROWS
#undef NIBBLES
#undef TABLE
#undef BYTES
#undef VALUES

} // namespace appliance::APPLIANCE_ISA
