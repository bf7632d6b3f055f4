// A product by itself, as Python calls it.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../runtime/export.h"
#include "../runtime/kernels.h"

using namespace appliance;

namespace {

enum Precision { INT8, BF16, FLOAT32 };

// The inputs of a row in the order of the matrix's columns.
void gather(const Matrix &matrix, const float *x, float *to) {
    for (int64_t column = 0; column < matrix.columns; ++column) {
        const int64_t input = matrix.inputs ? matrix.inputs[column] : column;
        to[column] = input >= 0 && input < matrix.input_width ? x[input] : 0.0f;
    }
}

} // namespace

// Blocks first_block … last_block - 1 of the product of x, [rows][input_width].
APPLIANCE_EXPORT void appliance_multiply(const Matrix *matrix, const float *x, int64_t rows, int32_t precision,
                                         const Target *target, int64_t first_block, int64_t last_block) {
    const LinearKernels &linear = *kernels().linear;
    const int64_t columns = matrix->columns, groups = columns / kActivationGroup, chunks = columns / chunk(*matrix);
    const bool dense = matrix->codes != Codes::U4 && matrix->codes != Codes::U8;
    const bool quantised = precision == INT8 && !dense;
    std::vector<float> values(std::size_t(columns * (quantised ? 1 : rows))), scales, sums(std::size_t(rows * chunks));
    std::vector<int8_t> codes;
    if (quantised) {
        codes.resize(std::size_t(rows * columns));
        scales.resize(std::size_t(rows * groups));
    }
    for (int64_t row = 0; row < rows; ++row) {
        float *at = values.data() + (quantised ? 0 : row * columns);
        gather(*matrix, x + row * matrix->input_width, at);
        if (quantised) {
            const TileRows tile = tile_of(rows, row, linear.tile_rows);
            linear.quantise(at, columns, chunk(*matrix), tile.count, int(row - tile.first),
                            codes.data() + tile.first * columns, scales.data() + tile.first * groups,
                            sums.data() + tile.first * chunks);
        }
        else
            linear.sum(at, columns, chunk(*matrix), precision == BF16, sums.data() + row * chunks);
    }
    const Panel panel{rows,        quantised ? codes.data() : nullptr, values.data(), scales.data(), sums.data(), columns,
                      columns,     groups,                             chunks};
    linear.multiply(*matrix, panel, *target, first_block, last_block);
}

// out: [count][input_width].
APPLIANCE_EXPORT void appliance_read_rows(const Matrix *matrix, const int64_t *rows, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i)
        kernels().linear->read_row(*matrix, rows[i], out + i * matrix->input_width);
}
