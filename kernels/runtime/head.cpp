#include "ops.h"

#include <algorithm>
#include <cmath>

namespace appliance {

Head::Head(Settings settings, Product product, Scratch *scratch)
    : settings_(settings), product_(std::move(product)), scratch_(scratch),
      own_logits_(sizeof(float) * kHeadRows * product_.outputs()) {}

void Head::want(const int32_t *rows, int count, float *logits) {
    rows_ = rows;
    count_ = count;
    logits_ = logits;
    best_.assign(size_t(count) * chunks_at_most(), Best{0.0f, -1});
}

int Head::chunks_at_most() const {
    // Many, since the product is long, and a thread with another program on its core should hold few of them.
    const int chunks = settings_.threads == 1 ? 1 : 16 * settings_.threads;
    return int(std::min<int64_t>(chunks, product_.blocks()));
}

void Head::plan(const Step &, std::vector<int> &chunks) {
    for (int first = 0; first < count_; first += kHeadRows)
        chunks.push_back(chunks_at_most());
}

void Head::run(const Step &step, int phase, int chunk, int thread) {
    const Kernels &kernels = *step.kernels;
    Scratch::Own &own = scratch_->own[thread];
    const int first = phase * kHeadRows, rows = std::min(kHeadRows, count_ - first);
    if (scratch_->claim(thread, step.number, this, phase))
        for (int row = 0; row < rows; ++row)
            prepare_row(kernels, settings_.source, rows_[first + row], product_.panels(), own.panels,
                        PanelRows{0, rows}, row, own);
    const int64_t width = product_.outputs();
    float *out = logits_ ? logits_ + first * width : own_logits_.as<float>();
    const Step::Range blocks = Step::part(product_.blocks(), chunks_at_most(), chunk);
    product_.multiply(kernels, own.panels, PanelRows{0, rows}, Target{out, width, false, 1.0f, nullptr}, blocks);
    const Step::Range columns{blocks.first * kBlockRows, std::min(blocks.last * kBlockRows, width)};
    for (int row = 0; row < rows; ++row)
        finish(kernels, out + row * width, columns, best_[size_t(first + row) * chunks_at_most() + chunk]);
}

void Head::finish(const Kernels &kernels, float *logits, Step::Range range, Best &best) const {
    if (settings_.scale != 1.0f || settings_.softcap != 0.0f)
        for (int64_t i = range.first; i < range.last; ++i) {
            logits[i] *= settings_.scale;
            // What is infinite must not become a number.
            if (settings_.softcap != 0.0f)
                logits[i] = std::tanh(logits[i] / settings_.softcap) * settings_.softcap + logits[i] * 0.0f;
        }
    const Largest found = (*kernels.argmax)(logits + range.first, range.last - range.first);
    best = {found.value, found.index < 0 ? -1 : int32_t(range.first + found.index)};
}

int32_t Head::largest(int row) const {
    const Best *chunks = best_.data() + size_t(row) * chunks_at_most();
    Best best = chunks[0];
    for (int chunk = 0; chunk < chunks_at_most(); ++chunk) {
        if (chunks[chunk].index < 0)
            return -1;
        if (chunks[chunk].value > best.value)
            best = chunks[chunk];
    }
    return best.index;
}

} // namespace appliance
