// One step of a model, and the operations that it consists of.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace appliance {

// Memory that is written before it is read, in huge pages where the system has some.
class Memory {
  public:
    Memory() = default;
    explicit Memory(size_t bytes);
    template <typename T> T *as() const { return reinterpret_cast<T *>(bytes_.get()); }

  private:
    struct Free {
        void operator()(uint8_t *bytes) const { std::free(bytes); }
    };
    std::unique_ptr<uint8_t, Free> bytes_;
};

// Consecutive rows of a step that are one sequence's tokens.
struct Sequence {
    int32_t first_row, rows, position;
};

// Attention over a sequence's context by one KV head, up to kQueryTokens tokens of it: whole, or a run of segments.
struct AttentionItem {
    int32_t sequence, first_token, tokens, kv_head;
    int32_t first_segment, last_segment; // first < 0: whole
    int64_t partials; // where its segments' partial results begin, in floats
};

// What a KV group's layers have in common in a step.
struct GroupStep {
    const int32_t *tables = nullptr; // [sequences][table_width]
    int32_t table_width = 0;
    std::vector<int32_t> fresh; // blocks that are written from their first token
};

struct KvGroup {
    KvShape shape;
    uint8_t *pool = nullptr;
    GroupStep step;
};

// How a step's attention is split, for all layers of a group that see equally far.
struct AttentionPlan {
    KvGroup *group;
    int32_t window;
    std::vector<AttentionItem> items;  // of one KV head; the longest first
    std::vector<AttentionItem> merged; // those that were split, once each
    Memory partials;
    size_t partial_floats = 0;
};

struct Buffer {
    Memory memory;
    int64_t stride; // floats

    float *row(int64_t index) const { return memory.as<float>() + index * stride; }
};

struct Step {
    const Kernels *kernels;
    int threads;
    uint64_t number; // no two steps of a model have the same
    int rows;
    const int32_t *token_ids;
    std::vector<int32_t> positions;    // of each row
    std::vector<int32_t> sequence_of; // each row
    std::vector<Sequence> sequences;

    // The part of `count` things that is chunk `index` of `chunks`.
    struct Range {
        int64_t first, last;
    };
    static Range part(int64_t count, int chunks, int index) {
        return {count * index / chunks, count * (index + 1) / chunks};
    }
    int row_chunks() const { return rows < 4 * threads ? rows : 4 * threads; }
    int block_chunks(int64_t blocks) const {
        const int64_t chunks = threads == 1 ? 1 : 4 * threads;
        return int(blocks < chunks ? blocks : chunks);
    }
};

// An operation contributes phases to a step.
class Op {
  public:
    virtual ~Op() = default;
    // Appends the number of chunks of each of its phases.
    virtual void plan(const Step &step, std::vector<int> &chunks) = 0;
    virtual void run(const Step &step, int phase, int chunk, int thread) = 0;
};

} // namespace appliance
