// Operations on rows by themselves.
#include "ops.h"

#include <cstring>

namespace appliance {

void ClearBlocks::plan(const Step &, std::vector<int> &chunks) {
    int count = 0;
    for (const auto &group : groups_)
        count += int(group->step.fresh.size());
    chunks.push_back(count);
}

void ClearBlocks::run(const Step &, int, int chunk, int) {
    for (const auto &group : groups_) {
        const int count = int(group->step.fresh.size());
        if (chunk < count) {
            const int64_t bytes = kv_block_bytes(group->shape);
            std::memset(group->pool + group->step.fresh[chunk] * bytes, 0, bytes);
            return;
        }
        chunk -= count;
    }
}

void Embed::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void Embed::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row) {
        float *out = out_->row(row);
        step.kernels->linear->read_row(matrix_, step.token_ids[row], out);
        if (scale_ != 1.0f)
            for (int64_t i = 0; i < matrix_.input_width; ++i)
                out[i] *= scale_;
    }
}

void Linear::plan(const Step &step, std::vector<int> &chunks) {
    if (step.rows > kPrivateRows)
        chunks.push_back(step.row_chunks());
    chunks.push_back(step.block_chunks(product_.blocks()));
}

void Linear::run(const Step &step, int phase, int chunk, int thread) {
    const Kernels &kernels = *step.kernels;
    const auto &panels = product_.panels();
    Scratch::Own &own = scratch_->own[thread];
    const PanelRows rows{0, step.rows};
    if (step.rows > kPrivateRows && phase == 0) {
        const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
        for (int64_t row = range.first; row < range.last; ++row)
            prepare_row(kernels, source_, row, panels, scratch_->shared, rows, row, own);
        return;
    }
    const bool alone = step.rows <= kPrivateRows;
    if (alone && scratch_->claim(thread, step.number, this, phase))
        for (int row = 0; row < step.rows; ++row)
            prepare_row(kernels, source_, row, panels, own.panels, rows, row, own);
    const Target target{out_->row(0), out_->stride, add_, factor_, nullptr};
    const Step::Range blocks = Step::part(product_.blocks(), step.block_chunks(product_.blocks()), chunk);
    product_.multiply(kernels, alone ? own.panels : scratch_->shared, rows, target, blocks);
}

void Normalise::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void Normalise::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row)
        (*step.kernels->rms_norm)(x_->row(row), weight_, out_->row(row), width_, eps_);
}

void AddTo::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void AddTo::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row) {
        float *x = x_->row(row), *target = target_->row(row);
        if (weight_)
            (*step.kernels->rms_norm)(x, weight_, x, width_, eps_);
        for (int64_t i = 0; i < width_; ++i)
            target[i] += factor_ * x[i];
    }
}

void Gated::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void Gated::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row) {
        const float *x = source_.buffer->row(row);
        (*step.kernels->gated_product)(source_.activation, source_.alpha, source_.limit, x, x + source_.width,
                                       out_->row(row), source_.width);
    }
}

void Finite::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void Finite::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row) {
        const float *x = x_->row(row);
        float nothing = 0.0f; // times a number nothing, times anything else not a number
        for (int64_t i = 0; i < width_; ++i)
            nothing += x[i] * 0.0f;
        result_[row] = nothing == 0.0f;
    }
}

} // namespace appliance
