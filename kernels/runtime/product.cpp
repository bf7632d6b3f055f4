#include "product.h"

#include <algorithm>
#include <cstring>

namespace appliance {

PanelStore::PanelStore(int64_t rows, int64_t columns)
    // Odd numbers of cache lines, so that rows don't fall onto each other in the cache.
    : codes_stride_((columns + 127) / 128 * 128 + 64), values_stride_((columns + 31) / 32 * 32 + 16),
      groups_stride_((columns + 255) / 256 * 16 + 16), codes_(rows * codes_stride_),
      values_(rows * values_stride_ * sizeof(float)), scales_(rows * groups_stride_ * sizeof(float)),
      sums_(rows * groups_stride_ * sizeof(float)) {}

Panel PanelStore::view(const PanelShape &shape, PanelRows rows) const {
    const int64_t first = rows.first;
    const bool integers = shape.precision == Precision::INT8;
    Panel panel{};
    panel.rows = rows.count;
    panel.codes = integers ? codes_.as<int8_t>() + first * codes_stride_ : nullptr;
    panel.values = integers ? nullptr : values_.as<float>() + first * values_stride_;
    panel.scales = scales_.as<float>() + first * groups_stride_;
    panel.sums = sums_.as<float>() + first * groups_stride_;
    panel.codes_stride = codes_stride_;
    panel.values_stride = values_stride_;
    panel.scales_stride = panel.sums_stride = groups_stride_;
    return panel;
}

void PanelStore::prepare(const Kernels &kernels, const PanelShape &shape, const float *x, PanelRows rows,
                         int64_t row, float *scratch) const {
    const bool integers = shape.precision == Precision::INT8;
    float *values = integers ? scratch : values_.as<float>() + (rows.first + row) * values_stride_;
    if (shape.inputs) {
        for (int64_t column = 0; column < shape.columns; ++column)
            values[column] = shape.inputs[column] < 0 ? 0.0f : x[shape.inputs[column]];
        x = values;
    } else if (!integers || shape.columns != shape.width) {
        std::memcpy(values, x, shape.width * sizeof(float));
        std::fill(values + shape.width, values + shape.columns, 0.0f);
        x = values;
    }
    const TileRows tile = integers ? tile_of(rows.count, row, kernels.linear->tile_rows) : TileRows{row, 1};
    const int64_t first = rows.first + tile.first;
    float *sums = sums_.as<float>() + first * groups_stride_;
    if (integers)
        kernels.linear->quantise(x, shape.columns, shape.chunk, tile.count, int(row - tile.first),
                                 codes_.as<int8_t>() + first * codes_stride_,
                                 scales_.as<float>() + first * groups_stride_, sums);
    else
        kernels.linear->sum(values, shape.columns, shape.chunk, shape.precision == Precision::BF16, sums);
}

void Product::add(const Matrix &matrix, Precision precision) {
    const bool dense = matrix.codes != Codes::U4 && matrix.codes != Codes::U8;
    if (dense && precision == Precision::INT8)
        precision = Precision::F32;
    const PanelShape shape{matrix.columns, matrix.input_width, chunk(matrix), matrix.inputs, precision};
    const auto found = std::find(panels_.begin(), panels_.end(), shape);
    const size_t panel = found - panels_.begin();
    if (found == panels_.end())
        panels_.push_back(shape);
    const int64_t blocks = (matrix.rows + kBlockRows - 1) / kBlockRows;
    parts_.push_back({matrix, panel, outputs_, blocks_, blocks});
    outputs_ += matrix.rows;
    blocks_ += blocks;
}

int64_t Product::max_columns() const {
    int64_t most = 0;
    for (const PanelShape &panel : panels_)
        most = std::max({most, panel.columns, panel.width});
    return most;
}

void Product::multiply(const Kernels &kernels, const std::vector<PanelStore> &stores, PanelRows rows,
                       const Target &target, Step::Range blocks) const {
    for (const Part &part : parts_) {
        const int64_t first = std::max<int64_t>(blocks.first - part.first_block, 0);
        const int64_t last = std::min(blocks.last - part.first_block, part.blocks);
        if (first >= last)
            continue;
        Target own = target;
        own.out += part.first_output;
        own.bias = bias_ ? bias_ + part.first_output : nullptr;
        const Panel panel = stores[part.panel].view(panels_[part.panel], rows);
        kernels.linear->multiply(part.matrix, panel, own, first, last);
    }
}

bool Scratch::claim(int thread, uint64_t step, const void *op, int phase) {
    Own &mine = own[thread];
    if (mine.step == step && mine.op == op && mine.phase == phase)
        return false;
    mine.step = step;
    mine.op = op;
    mine.phase = phase;
    return true;
}

void prepare_row(const Kernels &kernels, const Source &source, int64_t index, const std::vector<PanelShape> &panels,
                 const std::vector<PanelStore> &stores, PanelRows rows, int64_t row, Scratch::Own &own) {
    const float *x = source.buffer->row(index);
    float *made = own.row.as<float>();
    switch (source.kind) {
    case Source::Kind::PLAIN:
        break;
    case Source::Kind::NORM:
        (*kernels.rms_norm)(x, source.weight, made, source.width, source.eps);
        x = made;
        break;
    case Source::Kind::GATED:
        (*kernels.gated_product)(source.activation, source.alpha, source.limit, x, x + source.width, made,
                                 source.width);
        x = made;
        break;
    }
    for (size_t panel = 0; panel < panels.size(); ++panel)
        stores[panel].prepare(kernels, panels[panel], x, rows, row, own.padded.as<float>());
}

} // namespace appliance
