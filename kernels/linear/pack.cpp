// Weights into the layout of cpu.h.

#include "pack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../repack/bits.h"
#include "../runtime/export.h"
#include "layout.h"

namespace appliance {

int64_t block_bytes(const Matrix &matrix) {
    const int64_t super = super_columns(matrix);
    return (matrix.columns + super - 1) / super * header_bytes(matrix) +
           matrix.columns / matrix.group * group_bytes(matrix);
}

namespace {

constexpr int64_t kRows = kBlockRows;

inline uint32_t load_word(const uint8_t *from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

// Codes of one row and group, of a byte each, into the row's lane.
void write_codes(const Matrix &matrix, const uint16_t *values, const uint8_t *codes, int64_t row, uint8_t *to) {
    to += 4 * row;
    if (matrix.codes == Codes::U4) {
        for (int64_t column = 0; column < matrix.group; column += 8, to += 64) {
            const uint32_t word = load_word(codes + column) | load_word(codes + column + 4) << 4;
            std::memcpy(to, &word, sizeof word);
        }
    } else if (matrix.codes == Codes::U8) {
        for (int64_t column = 0; column < matrix.group; column += 4, to += 64)
            std::memcpy(to, codes + column, 4);
    } else {
        to -= 2 * row;
        for (int64_t column = 0; column < matrix.group; ++column, to += 2 * kRows)
            std::memcpy(to, values + codes[column], 2);
    }
}

// For each row of a block the number at `index` of its `stride`, or a zero.
void write_numbers(const void *from, int64_t size, int64_t stride, int64_t index, int64_t rows, uint8_t *to) {
    for (int64_t row = 0; row < kRows; ++row) {
        if (row < rows)
            std::memcpy(to + row * size, static_cast<const uint8_t *>(from) + (row * stride + index) * size, size_t(size));
        else
            std::memset(to + row * size, 0, size_t(size));
    }
}

const void *row_of(const void *numbers, int64_t size, int64_t row) {
    return static_cast<const uint8_t *>(numbers) + size * row;
}

class Packer {
  public:
    Packer(const Matrix &matrix, const QuantisedSource &source)
        : matrix(matrix), source(source), groups((source.columns + source.group - 1) / source.group),
          supers(matrix.super ? (groups * matrix.group + matrix.super - 1) / matrix.super : groups),
          row_bytes((source.columns * source.bits + 7) / 8), raw(size_t(groups * source.group + 8)),
          codes(size_t(kRows * matrix.columns)) {}

    void block(int64_t index, uint8_t *to) {
        first = index * kRows;
        rows = std::min(kRows, matrix.rows - first);
        for (int64_t row = 0; row < rows; ++row)
            read_codes(row);
        std::fill(codes.begin() + rows * matrix.columns, codes.end(), uint8_t(0));
        for (int64_t column = 0; column < matrix.columns; column += matrix.group) {
            const int64_t group = column / matrix.group;
            if (matrix.super && column % matrix.super == 0)
                to = header(column / matrix.super, to);
            for (int64_t row = 0; row < kRows; ++row)
                write_codes(matrix, source.values, &codes[size_t(row * matrix.columns + column)], row, to);
            to = scales(group, to + codes_bytes(matrix, matrix.group));
        }
    }

  private:
    // With their padding, columns and rows beyond the last as zeros.
    void read_codes(int64_t row) {
        const uint8_t *from = source.codes + (first + row) * row_bytes;
        uint8_t *to = &codes[size_t(row * matrix.columns)];
        unpack_of(source.bits)(from, source.columns, raw.data());
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t start = group * source.group;
            const int64_t count = std::min<int64_t>(source.group, source.columns - start);
            std::memcpy(to + group * matrix.group, raw.data() + start, size_t(count));
        }
    }

    uint8_t *header(int64_t super, uint8_t *to) {
        for (const void *numbers : {source.scales, source.biases}) {
            if (!numbers)
                continue;
            write_numbers(row_of(numbers, 2, first * supers), 2, supers, super, super < supers ? rows : 0, to);
            to += 2 * kRows;
        }
        return to;
    }

    uint8_t *scales(int64_t group, uint8_t *to) {
        const int64_t present = group < groups ? rows : 0;
        const bool sub = matrix.scales == Scales::SUB;
        const int64_t size = scales_bytes(matrix) / kRows;
        to = numbers(sub ? source.sub_scales : source.scales, size, group, present, to);
        if (matrix.offsets == Offsets::BIASES)
            to = numbers(sub ? source.sub_biases : source.biases, size, group, present, to);
        if (matrix.offsets == Offsets::ZEROS)
            to = numbers(source.zeros, 1, group, present, to);
        return to;
    }

    uint8_t *numbers(const void *from, int64_t size, int64_t group, int64_t present, uint8_t *to) {
        write_numbers(row_of(from, size, first * groups), size, groups, group, present, to);
        return to + size * kRows;
    }

    const Matrix &matrix;
    const QuantisedSource &source;
    const int64_t groups, supers, row_bytes;
    int64_t first = 0, rows = 0;
    std::vector<uint8_t> raw, codes;
};

template <typename T> void pack_values(const Matrix &matrix, const T *from, int64_t columns, T *to) {
    for (int64_t first = 0; first < matrix.rows; first += kRows) {
        const int64_t rows = std::min(kRows, matrix.rows - first);
        for (int64_t column = 0; column < matrix.columns; ++column, to += kRows)
            for (int64_t row = 0; row < kRows; ++row)
                to[row] = row < rows && column < columns ? from[(first + row) * columns + column] : T(0);
    }
}

} // namespace
} // namespace appliance

using namespace appliance;

APPLIANCE_EXPORT int64_t appliance_block_bytes(const Matrix *matrix) { return block_bytes(*matrix); }

APPLIANCE_EXPORT void appliance_pack_quantised(const Matrix *matrix, const QuantisedSource *source) {
    Packer packer(*matrix, *source);
    uint8_t *to = const_cast<uint8_t *>(matrix->data);
    const int64_t blocks = (matrix->rows + kBlockRows - 1) / kBlockRows, bytes = block_bytes(*matrix);
    for (int64_t block = 0; block < blocks; ++block)
        packer.block(block, to + block * bytes);
}

// values: [rows][columns] of the type that the matrix has.
APPLIANCE_EXPORT void appliance_pack_dense(const Matrix *matrix, const void *values, int64_t columns) {
    uint8_t *to = const_cast<uint8_t *>(matrix->data);
    if (matrix->codes == Codes::F32)
        pack_values(*matrix, static_cast<const uint32_t *>(values), columns, reinterpret_cast<uint32_t *>(to));
    else
        pack_values(*matrix, static_cast<const uint16_t *>(values), columns, reinterpret_cast<uint16_t *>(to));
}
