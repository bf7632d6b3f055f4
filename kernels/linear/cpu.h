// Products with packed weight matrices: y = x · Wᵀ.
//
// A matrix lies in blocks of 16 rows, one lane a row; a block is a sequence of super-blocks of columns (one, where there
// are none), each
//
//     header          with SUB scales: 16 fp16 scales of the super-block, then, with BIASES, 16 fp16 scales of biases
//     group, group …  `group` columns each:
//         codes       U4: group / 8 lines of 64 bytes; bytes 4n … 4n + 3 of line j are row n's: low nibbles are columns
//                         8j … 8j + 3, high nibbles 8j + 4 … 8j + 7
//                     U8: group / 4 lines of 64 bytes; bytes 4n … 4n + 3 of line j are row n's columns 4j … 4j + 3
//                     F16, BF16, F32: 16 values of each column
//         scales      of the 16 rows: F16, BF16 or F32; SUB: int8, to be multiplied by the super-block's; NONE: nothing
//         offsets     ZEROS: 16 bytes; BIASES: as the scales; CONSTANT: nothing
//
// Rows beyond the last and columns beyond the last are zeros; the last super-block may have fewer groups. One layout
// serves every instruction set.
#pragma once

#include <cstdint>

namespace appliance {

enum class Codes : int32_t { U4, U8, F16, BF16, F32 };
enum class Scales : int32_t { NONE, F16, BF16, F32, SUB };
enum class Offsets : int32_t { CONSTANT, ZEROS, BIASES };

// weight = (table[code] - constant) · scale          CONSTANT
//          (table[code] - zero) · scale              ZEROS
//          table[code] · scale + bias                BIASES
struct Matrix {
    int64_t rows;
    int64_t columns; // with padding: a multiple of 32 and of `group`
    int32_t group;   // columns that share a scale: a multiple of 16; all columns where there are no scales
    int32_t super;   // columns of a super-block, a multiple of `group`; 0 without SUB scales
    Codes codes;
    Scales scales;
    Offsets offsets;
    float constant;
    int32_t has_table;  // else table[code] = code; only with U4
    uint8_t table[16];
    const uint8_t *data; // 64-byte aligned
    const int32_t *inputs; // [columns]: the input that a column multiplies, -1 for none; null: the first `input_width`
                           // columns are the inputs in order
    int64_t input_width;
};

// Rows of a block.
constexpr int kBlockRows = 16;

// Activations are quantised in groups of this many columns.
constexpr int kActivationGroup = 32;

// How many columns share an entry of Panel::sums: what a scale covers at least.
static inline int chunk(const Matrix &matrix) { return matrix.group % kActivationGroup == 0 ? kActivationGroup : 16; }

// Rows of activations as a product reads them.
//
// Codes are laid out in tiles of a few rows, as `tile_of` says: the codes of a tile that begins with row r are those at
// r · codes_stride: of the first four columns, those of each of its rows, then of the next four columns; likewise its
// scales and sums, each row's of the first group or chunk, then of the next. Values and their sums lie row by row.
struct Panel {
    int64_t rows;
    const int8_t *codes; // value = code · scale; null: `values` are multiplied instead
    const float *values;
    const float *scales; // one for each kActivationGroup columns; only with codes
    const float *sums;   // the sum of each chunk's values, as they are after rounding
    int64_t codes_stride, values_stride, scales_stride, sums_stride;
};

constexpr int kMaxTileRows = 12;
// Rows whose codes stay in the second-level cache while blocks pass by: a whole number of tiles of every size.
constexpr int64_t kPassRows = 192;

struct TileRows {
    int64_t first;
    int count;
};
// The tile of a row among `rows` rows: at most `most` of them in each, as even as possible in each pass.
static inline TileRows tile_of(int64_t rows, int64_t row, int most) {
    const int64_t pass = row / kPassRows * kPassRows, left = rows - pass, here = left < kPassRows ? left : kPassRows;
    const int64_t tiles = (here + most - 1) / most;
    int64_t tile = (row - pass) * tiles / here;
    while (here * (tile + 1) / tiles <= row - pass)
        ++tile;
    const int64_t first = here * tile / tiles;
    return {pass + first, int(here * (tile + 1) / tiles - first)};
}

// Where a product goes: out[row · stride + n] = y, or += factor · y; y holds the bias where there is one.
struct Target {
    float *out;
    int64_t stride;
    int32_t add;
    float factor;
    const float *bias; // [rows of the matrix] or null
};

struct LinearKernels {
    int tile_rows; // most rows of a tile
    // One row of `columns` values, as row `place` of a tile of `tile` rows that begins at the pointers: codes = round(x /
    // scale), the largest of a group becoming ±127; sums for chunks of `chunk`. A value that is not a finite number makes
    // the scale of its group not a number.
    void (*quantise)(const float *x, int64_t columns, int chunk, int tile, int place, int8_t *codes, float *scales,
                     float *sums);
    // The same for a row that stays in floating point. `round_bf16`: first, x is rounded to bfloat16 in place.
    void (*sum)(float *x, int64_t columns, int chunk, bool round_bf16, float *sums);
    // Row blocks first_block … last_block - 1 (of 16 rows) for all rows of the panel; its codes where it has some, which
    // matrices of U4 and U8 can be multiplied with.
    // A row's result depends on nothing but itself: not on how many rows there are nor where it stands among them.
    void (*multiply)(const Matrix &matrix, const Panel &panel, const Target &target, int64_t first_block,
                     int64_t last_block);
    // out[column] = weight, for the `input_width` inputs of one row of a matrix.
    void (*read_row)(const Matrix &matrix, int64_t row, float *out);
};

int64_t block_bytes(const Matrix &matrix); // of 16 rows

} // namespace appliance
