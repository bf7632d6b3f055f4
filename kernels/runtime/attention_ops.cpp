// Operations on queries, keys and values.
#include "ops.h"

#include <algorithm>

namespace appliance {

void FinishQkv::plan(const Step &step, std::vector<int> &chunks) { chunks.push_back(step.row_chunks()); }

void FinishQkv::run(const Step &step, int, int chunk, int) {
    const Kernels &kernels = *step.kernels;
    const KvShape &shape = group_->shape;
    uint8_t *layer = group_->pool + layer_ * plane_bytes(shape) * 2 * shape.kv_heads;
    const Step::Range range = Step::part(step.rows, step.row_chunks(), chunk);
    for (int64_t row = range.first; row < range.last; ++row) {
        const int position = step.positions[row];
        float *queries = qkv_->row(row), *keys = queries + heads_.queries * heads_.dim;
        const float *values = keys + heads_.keys * heads_.dim;
        if (steps_.q_norm) {
            normalise(kernels, queries, steps_.q_norm, heads_.queries);
            normalise(kernels, keys, steps_.k_norm, heads_.keys);
        }
        if (steps_.half) {
            const int64_t at = int64_t(position) * steps_.half;
            (*kernels.rope)(queries, heads_.queries + heads_.keys, heads_.dim, steps_.cos + at, steps_.sin + at,
                            steps_.half);
        }
        const GroupStep &group = group_->step;
        const int32_t *table = group.tables + int64_t(step.sequence_of[row]) * group.table_width;
        for (int head = 0; head < heads_.keys; ++head)
            kernels.attention->write(shape, layer, head, table[position / shape.block_size],
                                     position % shape.block_size, keys + head * heads_.dim,
                                     values + head * heads_.dim);
    }
}

void FinishQkv::normalise(const Kernels &kernels, float *heads, const float *weight, int count) const {
    if (steps_.whole) {
        (*kernels.rms_norm)(heads, weight, heads, int64_t(count) * heads_.dim, steps_.eps);
        return;
    }
    for (int head = 0; head < count; ++head)
        (*kernels.rms_norm)(heads + head * heads_.dim, weight, heads + head * heads_.dim, heads_.dim, steps_.eps);
}

void Attend::plan(const Step &, std::vector<int> &chunks) {
    chunks.push_back(int(plan_->items.size()));
    if (!plan_->merged.empty())
        chunks.push_back(int(plan_->merged.size()));
}

void Attend::run(const Step &step, int phase, int chunk, int) {
    const AttentionItem &item = phase ? plan_->merged[chunk] : plan_->items[chunk];
    const Attention work = attention(step, item);
    const AttentionKernels &kernels = *step.kernels->attention;
    float *partials = plan_->partials.as<float>() + item.partials;
    if (item.first_segment < 0) {
        kernels.attend(work);
    } else if (phase) {
        kernels.merge(work, partials);
    } else {
        const int64_t size = int64_t(item.tokens) * work.query_heads * partial_floats(work.shape);
        for (int segment = item.first_segment; segment < item.last_segment; ++segment)
            kernels.attend_segment(work, segment, partials + (segment - item.first_segment) * size);
    }
}

Attention Attend::attention(const Step &step, const AttentionItem &item) const {
    const Sequence &sequence = step.sequences[item.sequence];
    const KvShape &shape = group_->shape;
    const int shared = heads_.queries / heads_.keys;
    const int64_t row = sequence.first_row + item.first_token;
    const int64_t head = int64_t(item.kv_head) * shared;
    Attention work{};
    work.shape = shape;
    work.layer = group_->pool + layer_ * plane_bytes(shape) * 2 * shape.kv_heads;
    work.kv_head = item.kv_head;
    work.query_heads = shared;
    work.table = group_->step.tables + int64_t(item.sequence) * group_->step.table_width;
    work.first_position = sequence.position + item.first_token;
    work.tokens = item.tokens;
    work.window = plan_->window;
    work.scale = scale_;
    work.softcap = softcap_;
    work.sinks = sinks_ ? sinks_ + head : nullptr;
    work.queries = qkv_->row(row) + head * heads_.dim;
    work.out = out_->row(row) + head * heads_.dim;
    work.query_stride = qkv_->stride;
    work.out_stride = out_->stride;
    return work;
}

namespace {

Segments segments_of(const Step &step, const AttentionPlan &plan, const AttentionItem &item) {
    Attention work{};
    work.shape = plan.group->shape;
    work.first_position = step.sequences[item.sequence].position + item.first_token;
    work.tokens = item.tokens;
    work.window = plan.window;
    return segments(work);
}

// So many segments at a time are an item of its own.
void split(const AttentionItem &whole, Segments of_item, int run, int64_t floats_of_segment, AttentionPlan &plan,
           int64_t &floats) {
    AttentionItem merged = whole;
    merged.first_segment = of_item.first;
    merged.last_segment = of_item.last;
    merged.partials = floats;
    plan.merged.push_back(merged);
    for (int first = of_item.first; first < of_item.last; first += run) {
        AttentionItem part = whole;
        part.first_segment = first;
        part.last_segment = std::min(first + run, of_item.last);
        part.partials = floats;
        floats += (part.last_segment - first) * floats_of_segment;
        plan.items.push_back(part);
    }
}

} // namespace

void plan_attention(const Step &step, AttentionPlan &plan, int query_heads) {
    const KvShape &shape = plan.group->shape;
    struct Sized {
        AttentionItem item;
        Segments segments;
        int64_t cost;
    };
    std::vector<Sized> all;
    for (size_t sequence = 0; sequence < step.sequences.size(); ++sequence)
        for (int first = 0; first < step.sequences[sequence].rows; first += kQueryTokens)
            for (int head = 0; head < shape.kv_heads; ++head) {
                const int tokens = std::min(kQueryTokens, step.sequences[sequence].rows - first);
                const AttentionItem item{int32_t(sequence), first, tokens, head, -1, -1, 0};
                const Segments seen = segments_of(step, plan, item);
                all.push_back({item, seen, int64_t(tokens) * (seen.last - seen.first)});
            }
    std::stable_sort(all.begin(), all.end(), [](const Sized &a, const Sized &b) { return a.cost > b.cost; });
    plan.items.clear();
    plan.merged.clear();
    const int wanted = 4 * step.threads, shared = query_heads / shape.kv_heads;
    const bool few = step.threads > 1 && int(all.size()) < wanted;
    int64_t floats = 0;
    for (const Sized &each : all) {
        const int count = each.segments.last - each.segments.first;
        if (few && count > 1 && each.item.tokens <= kPrivateRows) {
            const int run = std::max(1, int(count * all.size() / wanted));
            split(each.item, each.segments, run, each.item.tokens * shared * partial_floats(shape), plan, floats);
        } else {
            plan.items.push_back(each.item);
        }
    }
    if (size_t(floats) > plan.partial_floats) {
        plan.partials = Memory(floats * sizeof(float));
        plan.partial_floats = floats;
    }
}

} // namespace appliance
