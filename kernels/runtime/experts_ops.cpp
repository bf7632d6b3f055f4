// Mixture of experts.
#include "ops.h"

#include <algorithm>
#include <cmath>

namespace appliance {

void Route::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void Route::run(const Step &step, int, int chunk, int) {
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row)
        choose(logits_->row(row), reinterpret_cast<int32_t *>(chosen_->row(row)), weights_->row(row));
}

void Route::choose(const float *logits, int32_t *chosen, float *weights) const {
    for (int place = 0; place < top_k_; ++place) {
        int best = -1;
        for (int expert = 0; expert < experts_; ++expert) {
            const bool taken = std::find(chosen, chosen + place, expert) != chosen + place;
            // What is not a number is taken where nothing else is left; it spoils the sum in any case.
            if (!taken && (best < 0 || logits[expert] > logits[best] || std::isnan(logits[best])))
                best = expert;
        }
        chosen[place] = best;
    }
    const float highest = logits[chosen[0]];
    float total = 0.0f;
    for (int expert = 0; expert < experts_; ++expert)
        total += normalised_ ? logits[expert] * 0.0f : std::exp(logits[expert] - highest);
    if (normalised_)
        for (int place = 0; place < top_k_; ++place)
            total += std::exp(logits[chosen[place]] - highest);
    for (int place = 0; place < top_k_; ++place)
        weights[place] = std::exp(logits[chosen[place]] - highest) / total;
}

Experts::Experts(Settings settings, std::vector<Product> gate_ups, std::vector<Product> downs, Scratch *scratch)
    : settings_(settings), gate_ups_(std::move(gate_ups)), downs_(std::move(downs)), scratch_(scratch) {
    active_.reserve(gate_ups_.size());
    const size_t slots = size_t(settings.max_rows) * settings.top_k;
    row_of_.resize(slots);
    active_index_.resize(slots);
    slots_of_.resize(slots);
    weight_of_.resize(slots);
}

SlotNeeds Experts::needs() const {
    SlotNeeds needs{int64_t(settings_.max_rows) * settings_.top_k, 1, 0, gate_ups_[0].outputs(), downs_[0].outputs()};
    for (const auto *products : {&gate_ups_, &downs_})
        for (const Product &product : *products) {
            needs.panels = std::max(needs.panels, product.panels().size());
            needs.columns = std::max(needs.columns, product.max_columns());
        }
    return needs;
}

int Experts::most_active(const Step &step) const {
    return int(std::min<int64_t>(gate_ups_.size(), int64_t(step.rows) * settings_.top_k));
}

int Experts::pieces(const Step &step) const {
    return std::max(1, (4 * step.threads + most_active(step) - 1) / most_active(step));
}

void Experts::plan(const Step &step, std::vector<int> &chunks) {
    const int slots = step.rows * settings_.top_k;
    const int slot_chunks = std::min(slots, 4 * step.threads);
    const int products = most_active(step) * pieces(step);
    for (int count : {1, slot_chunks, products, slot_chunks, products, step.row_chunks()})
        chunks.push_back(count);
}

void Experts::run(const Step &step, int phase, int chunk, int thread) {
    const int slots = step.rows * settings_.top_k;
    Scratch::Own &own = scratch_->own[thread];
    Slots &slots_memory = scratch_->slots;
    const Step::Range range = Step::part(slots, std::min(slots, 4 * step.threads), chunk);
    switch (phase) {
    case 0:
        group(step);
        return;
    case 1:
        for (int64_t slot = range.first; slot < range.last; ++slot)
            prepare(step, settings_.x, row_of_[slot], gate_ups_, slots_memory.panels, int(slot), own);
        return;
    case 2:
        multiply(step, gate_ups_, slots_memory.panels, slots_memory.gate_up, chunk);
        return;
    case 3: {
        Source gated = settings_.gated;
        gated.buffer = &slots_memory.gate_up;
        for (int64_t slot = range.first; slot < range.last; ++slot)
            prepare(step, gated, slot, downs_, slots_memory.panels, int(slot), own);
        return;
    }
    case 4:
        multiply(step, downs_, slots_memory.panels, slots_memory.down, chunk);
        return;
    default:
        const Step::Range rows = Step::part(step.rows, step.row_chunks(), chunk);
        for (int64_t row = rows.first; row < rows.last; ++row)
            combine(step, row);
    }
}

// Counting sort of (row, place) by expert.
void Experts::group(const Step &step) {
    const int top_k = settings_.top_k;
    std::vector<int32_t> begin(gate_ups_.size() + 1, 0);
    for (int row = 0; row < step.rows; ++row) {
        const int32_t *chosen = reinterpret_cast<const int32_t *>(settings_.chosen->row(row));
        for (int place = 0; place < top_k; ++place)
            ++begin[chosen[place] + 1];
    }
    active_.clear();
    for (size_t expert = 0; expert < gate_ups_.size(); ++expert) {
        const int count = begin[expert + 1];
        begin[expert + 1] += begin[expert];
        if (count)
            active_.push_back({int(expert), begin[expert], begin[expert + 1]});
    }
    for (int row = 0; row < step.rows; ++row) {
        const int32_t *chosen = reinterpret_cast<const int32_t *>(settings_.chosen->row(row));
        for (int place = 0; place < top_k; ++place) {
            const int slot = begin[chosen[place]]++;
            row_of_[slot] = row;
            weight_of_[slot] = settings_.weights->row(row)[place];
            slots_of_[size_t(row) * top_k + place] = slot;
        }
        int32_t *mine = slots_of_.data() + size_t(row) * top_k;
        std::sort(mine, mine + top_k);
    }
    for (size_t i = 0; i < active_.size(); ++i)
        std::fill(active_index_.begin() + active_[i].first, active_index_.begin() + active_[i].last, int32_t(i));
}

const Experts::Active &Experts::active_of(int slot) const { return active_[active_index_[slot]]; }

// Row `index` of the source for the slot's expert.
void Experts::prepare(const Step &step, const Source &source, int64_t index, const std::vector<Product> &products,
                      const std::vector<PanelStore> &stores, int slot, Scratch::Own &own) const {
    const Active &active = active_of(slot);
    const PanelRows rows{active.first, active.last - active.first};
    prepare_row(*step.kernels, source, index, products[active.expert].panels(), stores, rows, slot - active.first, own);
}

void Experts::multiply(const Step &step, const std::vector<Product> &products, const std::vector<PanelStore> &stores,
                       const Buffer &out, int chunk) const {
    const size_t index = chunk / pieces(step);
    if (index >= active_.size())
        return;
    const Active &active = active_[index];
    const Product &product = products[active.expert];
    const Target target{out.row(active.first), out.stride, false, 1.0f, nullptr};
    product.multiply(*step.kernels, stores, PanelRows{active.first, active.last - active.first}, target,
                     Step::part(product.blocks(), pieces(step), chunk % pieces(step)));
}

void Experts::combine(const Step &, int64_t row) const {
    const int64_t width = downs_[0].outputs();
    const Buffer &down = scratch_->slots.down;
    float *out = settings_.out->row(row), *sum = out;
    const int32_t *slots = slots_of_.data() + row * settings_.top_k;
    if (settings_.add)
        sum = down.row(slots[0]); // a slot is one row's alone
    for (int64_t i = 0; i < width; ++i) {
        float total = 0.0f;
        for (int place = 0; place < settings_.top_k; ++place)
            total += weight_of_[slots[place]] * down.row(slots[place])[i];
        sum[i] = total;
    }
    if (settings_.add)
        for (int64_t i = 0; i < width; ++i)
            out[i] += settings_.factor * sum[i];
}

} // namespace appliance
