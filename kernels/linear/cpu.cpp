#include "cpu.h"

#include "tile.h"

namespace appliance::APPLIANCE_ISA {

constexpr int32_t kInfinity = 0x7F800000; // as bits
// Rows whose values stay in the second-level cache while blocks pass by: a whole number of tiles of every size.
constexpr int64_t kValuesRows = 48;

static void quantise(const float *x, int64_t columns, int chunk, int tile, int place, int8_t *codes, float *scales,
                     float *sums) {
    codes += 4 * place;
    scales += place;
    sums += place;
    const Ints magnitude = splat(int32_t(0x7FFFFFFF));
    for (int64_t column = 0; column < columns; column += kActivationGroup) {
        const Floats halves[2] = {load(x + column), load(x + column + kLanes)};
        // As integers, magnitudes keep their order, and what is not a number is the largest.
        const int32_t bits =
            reduce_max(max(as_ints(halves[0]) & magnitude, as_ints(halves[1]) & magnitude));
        const float largest = from_bits(uint32_t(bits));
        const bool finite = bits < kInfinity;
        // The inverse of less would overflow.
        const bool quantisable = finite && largest > 1e-30f;
        const float scale = !finite ? from_bits(0x7FC00000) : quantisable ? largest / 127.0f : 0.0f;
        const Floats inverse = splat(quantisable ? 127.0f / largest : 0.0f);
        int32_t half_sums[2];
        for (int half = 0; half < 2; ++half) {
            const Ints rounded = quantisable ? to_ints(halves[half] * inverse) : splat(int32_t(0));
            if (tile == 1) {
                store_int8(codes + column + half * kLanes, rounded);
            } else {
                int8_t quads[kLanes];
                store_int8(quads, rounded);
                for (int quad = 0; quad < kLanes; quad += 4)
                    std::memcpy(codes + (column + half * kLanes + quad) * tile, quads + quad, 4);
            }
            half_sums[half] = reduce_add(rounded);
        }
        *scales = scale;
        scales += tile;
        *sums = scale * float(chunk == kActivationGroup ? half_sums[0] + half_sums[1] : half_sums[0]);
        sums += tile;
        if (chunk != kActivationGroup) {
            *sums = scale * float(half_sums[1]);
            sums += tile;
        }
    }
}

static Floats to_bf16(Floats x) {
    const Ints bits = as_ints(x);
    const Ints even = shift_right(bits, 16) & splat(int32_t(1));
    const Ints rounded = (bits + splat(int32_t(0x7FFF)) + even) & splat(int32_t(0xFFFF0000));
    // What is not a number would become one.
    return select(less(splat(kInfinity), bits & splat(int32_t(0x7FFFFFFF))), x, as_floats(rounded));
}

static void sum(float *x, int64_t columns, int chunk, bool round_bf16, float *sums) {
    for (int64_t column = 0; column < columns; column += chunk) {
        Floats all = splat(0.0f);
        for (int64_t at = column; at < column + chunk; at += kLanes) {
            Floats lanes = load(x + at);
            if (round_bf16) {
                lanes = to_bf16(lanes);
                store(x + at, lanes);
            }
            all = all + lanes;
        }
        *sums++ = reduce_add(all);
    }
}

// How the rows of a tile are multiplied with a piece.
struct Tile {
    const Matrix &matrix;
    const Panel &panel;
    int64_t first_row;
    int rows;
    MultiplyCodes codes;
    MultiplyValues values;
};

static void multiply_piece(const Tile &tile, const Piece &piece, Sums &sums) {
    alignas(64) float weights[kPieceColumns * kLanes];
    const int64_t columns = int64_t(16) * piece.half_chunks * piece.chunks;
    for (int g = 0; g < piece.groups; ++g) {
        const uint8_t *codes = piece.codes + g * piece.group_bytes;
        for (int64_t line = 0; line < codes_bytes(tile.matrix, columns); line += 64)
            prefetch(codes + 8192 + line);
        decode_codes(tile.matrix, codes, columns, weights + g * columns * kLanes);
    }
    tile.values(piece, weights, tile.panel, tile.first_row, sums);
}

// The groups of a super-block, from `column` on; `data` is its header.
static void multiply_super(const Tile &tile, const uint8_t *data, int64_t column, int64_t columns, Sums &sums) {
    const Matrix &matrix = tile.matrix;
    const uint8_t *header = data;
    const int chunk_columns = chunk(matrix);
    const int64_t scales_at = codes_bytes(matrix, matrix.group);
    Piece piece;
    piece.half_chunks = chunk_columns / 16;
    piece.group_bytes = group_bytes(matrix);
    data += header_bytes(matrix);
    const int64_t most = kPieceColumns / chunk_columns * chunk_columns;
    const int64_t end = column + columns;
    while (column < end) {
        piece.first_column = column;
        const int64_t fitting = matrix.group < most ? most / matrix.group : 1;
        const int64_t left = (end - column) / matrix.group;
        piece.groups = int(fitting < left ? fitting : left);
        for (int g = 0; g < piece.groups; ++g) {
            const Pair pair = bias_pair(matrix, header, data + g * piece.group_bytes + scales_at);
            store(piece.scales[g][0], pair.scale);
            store(piece.scales[g][1], pair.bias);
        }
        for (int64_t at = 0; at < matrix.group; at += most) {
            const int64_t width = matrix.group - at < most ? matrix.group - at : most;
            piece.chunks = int(width / chunk_columns);
            piece.codes = data + codes_bytes(matrix, at);
            multiply_piece(tile, piece, sums);
            piece.first_column += width;
        }
        data += piece.groups * piece.group_bytes;
        column += piece.groups * matrix.group;
    }
}

static void put(const Tile &tile, const Target &target, int64_t first, const Sums &sums) {
    const int64_t left = tile.matrix.rows - first;
    const int count = left < kLanes ? int(left) : kLanes;
    const Floats bias = target.bias ? load_first(target.bias + first, count) : splat(0.0f);
    for (int m = 0; m < tile.rows; ++m) {
        float *out = target.out + (tile.first_row + m) * target.stride + first;
        Floats y = load(sums[m]);
        if (target.bias)
            y = y + bias;
        if (target.add)
            y = fma(splat(target.factor), y, count == kLanes ? load(out) : load_first(out, count));
        if (count == kLanes)
            store(out, y);
        else
            store_first(out, y, count);
    }
}

static void multiply_block(const Tile &tile, const Target &target, int64_t block, const uint8_t *data) {
    const Matrix &matrix = tile.matrix;
    alignas(64) Sums sums;
    if (tile.codes) {
        const Panel &panel = tile.panel;
        // Not as one argument: put together in memory, it would wait for what was stored before.
        tile.codes(matrix, data, panel.codes + tile.first_row * panel.codes_stride,
                   panel.scales + tile.first_row * panel.scales_stride,
                   panel.sums + tile.first_row * panel.sums_stride, sums);
        put(tile, target, block * kBlockRows, sums);
        return;
    }
    std::memset(sums, 0, sizeof sums);
    const int64_t super = super_columns(matrix);
    for (int64_t column = 0; column < matrix.columns; column += super) {
        const int64_t left = matrix.columns - column, columns = left < super ? left : super;
        multiply_super(tile, data, column, columns, sums);
        data += header_bytes(matrix) + columns / matrix.group * group_bytes(matrix);
    }
    put(tile, target, block * kBlockRows, sums);
}

// The tiles of the rows from `row` on that blocks pass by at once.
struct Pass {
    TileRows tiles[kPassRows / kTileRows];
    int count = 0;
    int64_t next;

    Pass(const Panel &panel, int64_t row) {
        const int64_t most = panel.codes ? kPassRows : kValuesRows;
        const int64_t end = panel.rows - row < most ? panel.rows : row + most;
        while (row < end) {
            const int left = int(end - row);
            tiles[count] = panel.codes ? tile_of(panel.rows, row, kTileRows)
                                       : TileRows{row, left < kTileRows ? left : kTileRows};
            row += tiles[count++].count;
        }
        next = row;
    }
};

static void multiply(const Matrix &matrix, const Panel &panel, const Target &target, int64_t first_block,
                     int64_t last_block) {
    const MultiplyCodes *codes = !panel.codes                ? nullptr
                                 : matrix.codes == Codes::U8 ? kBytes
                                 : matrix.has_table          ? kTable
                                                             : kNibbles;
    const int64_t bytes = block_bytes(matrix);
    for (int64_t row = 0; row < panel.rows;) {
        const Pass pass(panel, row);
        for (int64_t block = first_block; block < last_block; ++block)
            for (int i = 0; i < pass.count; ++i) {
                const TileRows rows = pass.tiles[i];
                const Tile tile{matrix,     panel, rows.first, rows.count, codes ? codes[rows.count - 1] : nullptr,
                                kValues[rows.count - 1]};
                multiply_block(tile, target, block, matrix.data + block * bytes);
            }
        row = pass.next;
    }
}

static void read_row(const Matrix &matrix, int64_t row, float *out) {
    const int64_t block = row / kBlockRows, lane = row % kBlockRows, super = super_columns(matrix);
    const uint8_t *data = matrix.data + block * block_bytes(matrix), *header = data;
    alignas(64) float codes[16 * kLanes], numbers[kLanes];
    for (int64_t first = 0; first < matrix.columns; first += matrix.group) {
        if (first % super == 0) {
            header = data;
            data += header_bytes(matrix);
        }
        const Pair pair = load_pair(matrix, header, data + codes_bytes(matrix, matrix.group));
        store(numbers, pair.scale);
        const float scale = numbers[lane];
        store(numbers, pair.bias);
        const float offset = numbers[lane];
        for (int64_t at = 0; at < matrix.group; at += 16) {
            decode_codes(matrix, data + codes_bytes(matrix, at), 16, codes);
            for (int64_t column = first + at; column < first + at + 16; ++column) {
                const float code = codes[(column - first - at) * kLanes + lane];
                const int64_t input = matrix.inputs ? matrix.inputs[column] : column;
                if (input >= 0 && input < matrix.input_width)
                    out[input] = matrix.offsets == Offsets::BIASES ? code * scale + offset : (code - offset) * scale;
            }
        }
        data += group_bytes(matrix);
    }
}

extern const LinearKernels linear = {kTileRows, quantise, sum, multiply, read_row};

} // namespace appliance::APPLIANCE_ISA
