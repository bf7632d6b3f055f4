// A model: its operations, the memory they work in, and the steps it is taken through.
#pragma once

#include "ops.h"

namespace appliance {

// What a step computes. All arrays outlive the call.
struct StepInput {
    int32_t rows, sequences, table_width, head_count;
    const int32_t *token_ids;     // [rows]
    const int32_t *layout;        // [sequences][3]: first row, number of rows, position of the first
    const int32_t *const *tables; // of each KV group, [sequences][table_width]
    const int32_t *head_rows;     // [head_count] rows whose largest logit is wanted
    int32_t *largest;             // [head_count], out: its index, -1 where a logit is not a finite number
    uint8_t *finite;              // [rows], out: whether the row's hidden state is
};

class Model : public Job {
  public:
    Model(int threads, int max_rows) : threads_(threads), max_rows_(max_rows) {}

    // Building: first what operations name by its index, then the operations in order, then `finish`.
    int add_buffer(int64_t width);
    int add_group(const KvShape &shape, uint8_t *pool);
    AttentionPlan *attention_plan(int group, int window);
    int add_product(Product product);
    void add(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
    // Makes room for what the experts of a layer need; all layers need the same or take turns in the largest.
    void add_experts(std::unique_ptr<Experts> op);
    void set_head(std::unique_ptr<Head> head) { head_ = std::move(head); }
    void finish(int hidden, int64_t width);

    Buffer *buffer(int index) { return buffers_[index].get(); }
    KvGroup *group(int index) { return groups_[index].get(); }
    Product product(int index) const { return products_[index]; }
    Scratch *scratch() { return &scratch_; }
    int threads() const { return threads_; }
    int max_rows() const { return max_rows_; }
    // Query heads of attention, the same for all layers.
    void set_query_heads(int count) { query_heads_ = count; }

    void run_step(const StepInput &input);
    // Logits [count][vocabulary] of rows of the last step.
    void run_logits(const int32_t *rows, int count, float *logits);

    void run_chunk(int phase, int chunk, int thread) override;

  private:
    void begin(const StepInput &input);
    void find_fresh(KvGroup &group) const;
    void plan(Op &op);
    void run_planned();

    struct Planned {
        Op *op;
        int first_phase;
    };

    const int threads_, max_rows_;
    int query_heads_ = 1;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::unique_ptr<KvGroup>> groups_;
    std::vector<std::unique_ptr<AttentionPlan>> attention_plans_;
    std::vector<Product> products_;
    std::vector<std::unique_ptr<Op>> ops_;
    std::unique_ptr<Head> head_;
    std::unique_ptr<Finite> finite_;
    Scratch scratch_;
    SlotNeeds slots_{};
    Step step_{};
    std::vector<int> chunks_;
    std::vector<Planned> planned_; // of each phase
    std::unique_ptr<Pool> pool_; // last, so that its threads end first
};

} // namespace appliance
