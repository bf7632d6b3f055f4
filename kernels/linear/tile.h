// Products of a few rows of activations with a piece of a block: what is compiled for each number of rows.
#pragma once

#include "decode.h"

namespace appliance::APPLIANCE_ISA {

constexpr int kTileRows = kWide ? kMaxTileRows : 4;
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

// What is known of the metadata when this is compiled: nothing, or groups of 32 columns with fp16 scales, and a constant
// offset or fp16 biases, as most GGUF files have them.
enum class Known { NOTHING, CONSTANT, BIASES };

static Known known(const Matrix &matrix) {
    if (matrix.group != kActivationGroup || matrix.scales != Scales::F16 || matrix.has_table)
        return Known::NOTHING;
    return matrix.offsets == Offsets::CONSTANT ? Known::CONSTANT
           : matrix.offsets == Offsets::BIASES ? Known::BIASES
                                               : Known::NOTHING;
}

template <Known Metadata>
static inline Pair pair_of(const Matrix &matrix, const uint8_t *header, const uint8_t *at) {
    if (Metadata == Known::NOTHING)
        return bias_pair(matrix, header, at);
    const Floats scale = load_half(at);
    return {scale, Metadata == Known::BIASES ? load_half(at + 2 * kLanes) : splat(-matrix.constant) * scale};
}

// sums[row][n] = the products of a block with a tile (see Panel); of a chunk the integers first, so a row's sums don't
// depend on `Rows`.
template <int Rows, int Bits, bool Table, int HalfChunks, Known Metadata>
static void multiply_codes_of(const Matrix &matrix, const uint8_t *data, const int8_t *codes, const float *scales,
                              const float *code_sums, Sums &sums) {
    constexpr int chunk_columns = 16 * HalfChunks, line_columns = 32 / Bits;
    const int64_t columns = matrix.columns, super = super_columns(matrix);
    const int64_t group = Metadata == Known::NOTHING ? matrix.group : kActivationGroup;
    const int64_t codes_of_group = group * 2 * Bits;
    const int64_t rest_of_group = Metadata == Known::NOTHING  ? group_bytes(matrix) - codes_of_group
                                  : Metadata == Known::BIASES ? 4 * kLanes
                                                              : 2 * kLanes;
    Floats f[Rows];
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        f[m] = splat(0.0f);
    const uint8_t *header = data;
    int64_t next_header = 0;
    for (int64_t column = 0; column < columns;) {
        if (Metadata == Known::NOTHING && column == next_header) {
            header = data;
            data += header_bytes(matrix);
            next_header += super;
        }
        const Pair pair = pair_of<Metadata>(matrix, header, data + codes_of_group);
        for (const int64_t end = column + group; column < end; column += chunk_columns) {
            Dots<Table ? 8 : Bits> dots[Rows], more[Rows]; // a table has whole bytes
#pragma GCC unroll kUnroll
            for (int at = 0; at < chunk_columns; at += line_columns, data += 64) {
                prefetch(data + 4096);
                const Bytes all = load_bytes(data);
                Bytes low = Bits == 4 ? low_nibbles(all) : all;
                if (Table)
                    low = look_up(matrix.table, low);
#pragma GCC unroll kUnroll
                for (int m = 0; m < Rows; ++m)
                    dots[m].add(low, load_four(codes + at * Rows + 4 * m));
                if (Bits == 4) {
                    Bytes high = high_nibbles(all);
                    if (Table)
                        high = look_up(matrix.table, high);
                    // With few rows, sums of their own don't wait for each other.
#pragma GCC unroll kUnroll
                    for (int m = 0; m < Rows; ++m)
                        (kWide && Rows <= 4 ? more : dots)[m].add(high, load_four(codes + (at + 4) * Rows + 4 * m));
                }
            }
#pragma GCC unroll kUnroll
            for (int m = 0; m < Rows; ++m) {
                const Ints sum = kWide && Rows <= 4 ? dots[m].sum() + more[m].sum() : dots[m].sum();
                f[m] = fma(to_floats(sum), pair.scale * splat(scales[m]), f[m]);
                f[m] = fma(pair.bias, splat(code_sums[m]), f[m]);
            }
            codes += chunk_columns * Rows;
            code_sums += Rows;
            if (HalfChunks == 2 || column % kActivationGroup)
                scales += Rows;
        }
        data += rest_of_group;
    }
#pragma GCC unroll kUnroll
    for (int m = 0; m < Rows; ++m)
        store(sums[m], f[m]);
}

template <int Rows, int Bits, bool Table>
static void multiply_codes(const Matrix &matrix, const uint8_t *data, const int8_t *codes, const float *scales,
                           const float *code_sums, Sums &sums) {
    const Known metadata = Table ? Known::NOTHING : known(matrix);
    if (!Table && metadata == Known::CONSTANT)
        multiply_codes_of<Rows, Bits, false, 2, Known::CONSTANT>(matrix, data, codes, scales, code_sums, sums);
    else if (!Table && Bits == 4 && metadata == Known::BIASES)
        multiply_codes_of<Rows, 4, false, 2, Known::BIASES>(matrix, data, codes, scales, code_sums, sums);
    else if (chunk(matrix) == kActivationGroup)
        multiply_codes_of<Rows, Bits, Table, 2, Known::NOTHING>(matrix, data, codes, scales, code_sums, sums);
    else
        multiply_codes_of<Rows, Bits, Table, 1, Known::NOTHING>(matrix, data, codes, scales, code_sums, sums);
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

typedef void (*MultiplyCodes)(const Matrix &, const uint8_t *block, const int8_t *codes, const float *scales,
                              const float *code_sums, Sums &);
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
