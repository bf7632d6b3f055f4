#include "model.h"

#include <algorithm>

namespace appliance {

namespace {

Buffer make_buffer(int64_t rows, int64_t width) {
    const int64_t stride = (width + 15) / 16 * 16;
    return {Memory(rows * stride * sizeof(float)), stride};
}

} // namespace

int Model::add_buffer(int64_t width) {
    buffers_.push_back(std::make_unique<Buffer>(make_buffer(max_rows_, width)));
    return int(buffers_.size()) - 1;
}

int Model::add_group(const KvShape &shape, uint8_t *pool) {
    auto group = std::make_unique<KvGroup>();
    group->shape = shape;
    group->pool = pool;
    groups_.push_back(std::move(group));
    return int(groups_.size()) - 1;
}

AttentionPlan *Model::attention_plan(int group, int window) {
    for (const auto &plan : attention_plans_)
        if (plan->group == groups_[group].get() && plan->window == window)
            return plan.get();
    attention_plans_.push_back(std::make_unique<AttentionPlan>());
    attention_plans_.back()->group = groups_[group].get();
    attention_plans_.back()->window = window;
    return attention_plans_.back().get();
}

int Model::add_product(Product product) {
    products_.push_back(std::move(product));
    return int(products_.size()) - 1;
}

void Model::add_experts(std::unique_ptr<Experts> op) {
    const SlotNeeds needs = op->needs();
    slots_.slots = std::max(slots_.slots, needs.slots);
    slots_.panels = std::max(slots_.panels, needs.panels);
    slots_.columns = std::max(slots_.columns, needs.columns);
    slots_.gate_up = std::max(slots_.gate_up, needs.gate_up);
    slots_.down = std::max(slots_.down, needs.down);
    add(std::move(op));
}

void Model::finish(int hidden, int64_t width) {
    finite_ = std::make_unique<Finite>(buffer(hidden), width);
    ops_.insert(ops_.begin(), std::make_unique<ClearBlocks>(groups_));
    size_t panels = 1;
    int64_t columns = width;
    for (const Product &product : products_) {
        panels = std::max(panels, product.panels().size());
        columns = std::max(columns, product.max_columns());
    }
    scratch_.own.resize(threads_);
    for (size_t i = 0; i < panels; ++i) {
        scratch_.shared.emplace_back(max_rows_, columns);
        for (Scratch::Own &own : scratch_.own)
            own.panels.emplace_back(std::max(kPrivateRows, kHeadRows), columns);
    }
    for (Scratch::Own &own : scratch_.own) {
        own.row = Memory((columns + 16) * sizeof(float));
        own.padded = Memory((columns + 16) * sizeof(float));
    }
    for (size_t i = 0; i < slots_.panels; ++i)
        scratch_.slots.panels.emplace_back(slots_.slots, slots_.columns);
    scratch_.slots.gate_up = make_buffer(slots_.slots, slots_.gate_up);
    scratch_.slots.down = make_buffer(slots_.slots, slots_.down);
    constexpr size_t most_phases = 6;
    pool_ = std::make_unique<Pool>(threads_, most_phases * (ops_.size() + 1) + max_rows_ / kHeadRows + 2);
}

void Model::run_step(const StepInput &input) {
    begin(input);
    for (auto &op : ops_)
        plan(*op);
    finite_->set_result(input.finite);
    plan(*finite_);
    head_->want(input.head_rows, input.head_count, nullptr);
    plan(*head_);
    run_planned();
    for (int i = 0; i < input.head_count; ++i)
        input.largest[i] = head_->largest(i);
}

void Model::run_logits(const int32_t *rows, int count, float *logits) {
    ++step_.number;
    chunks_.clear();
    planned_.clear();
    head_->want(rows, count, logits);
    plan(*head_);
    run_planned();
}

void Model::begin(const StepInput &input) {
    step_.kernels = &kernels();
    step_.threads = threads_;
    ++step_.number;
    step_.rows = input.rows;
    step_.token_ids = input.token_ids;
    step_.positions.resize(input.rows);
    step_.sequence_of.resize(input.rows);
    step_.sequences.clear();
    for (int i = 0; i < input.sequences; ++i) {
        const int32_t *layout = input.layout + 3 * i;
        const Sequence sequence{layout[0], layout[1], layout[2]};
        step_.sequences.push_back(sequence);
        for (int row = 0; row < sequence.rows; ++row) {
            step_.positions[sequence.first_row + row] = sequence.position + row;
            step_.sequence_of[sequence.first_row + row] = i;
        }
    }
    for (size_t i = 0; i < groups_.size(); ++i) {
        groups_[i]->step.tables = input.tables[i];
        groups_[i]->step.table_width = input.table_width;
        find_fresh(*groups_[i]);
    }
    for (const auto &plan : attention_plans_)
        plan_attention(step_, *plan, query_heads_);
    chunks_.clear();
    planned_.clear();
}

void Model::find_fresh(KvGroup &group) const {
    group.step.fresh.clear();
    const int size = group.shape.block_size;
    for (size_t i = 0; i < step_.sequences.size(); ++i) {
        const Sequence &sequence = step_.sequences[i];
        const int32_t *table = group.step.tables + i * group.step.table_width;
        const int first = (sequence.position + size - 1) / size, end = sequence.position + sequence.rows;
        for (int block = first; block * size < end; ++block)
            group.step.fresh.push_back(table[block]);
    }
}

void Model::plan(Op &op) {
    const int first = int(chunks_.size());
    op.plan(step_, chunks_);
    planned_.resize(chunks_.size(), Planned{&op, first});
}

void Model::run_planned() { pool_->run(*this, chunks_); }

void Model::run_chunk(int phase, int chunk, int thread) {
    const Planned &planned = planned_[phase];
    planned.op->run(step_, phase - planned.first_phase, chunk, thread);
}

} // namespace appliance
