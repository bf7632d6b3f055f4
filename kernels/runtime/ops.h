// The operations of a step program (engine/program.py), some of them several at once.
#pragma once

#include "product.h"

namespace appliance {

// Rows that every thread prepares for a product for itself, which is cheaper than a phase of its own.
constexpr int kPrivateRows = 4;
// Rows of a head's product at once.
constexpr int kHeadRows = 32;

// Clears the blocks that are written from their first token in this step: what a block held before is masked, but not a
// number times nothing would still not be a number.
class ClearBlocks : public Op {
  public:
    explicit ClearBlocks(std::vector<std::unique_ptr<KvGroup>> &groups) : groups_(groups) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    std::vector<std::unique_ptr<KvGroup>> &groups_;
};

// out = weight[token] · scale
class Embed : public Op {
  public:
    Embed(const Matrix &matrix, Buffer *out, float scale) : matrix_(matrix), out_(out), scale_(scale) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    const Matrix matrix_;
    Buffer *const out_;
    const float scale_;
};

// out = source · Wᵀ + bias, or out += factor · that.
class Linear : public Op {
  public:
    Linear(Source source, Product product, Buffer *out, bool add, float factor, Scratch *scratch)
        : source_(source), product_(std::move(product)), out_(out), add_(add), factor_(factor), scratch_(scratch) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    const Source source_;
    const Product product_;
    Buffer *const out_;
    const bool add_;
    const float factor_;
    Scratch *const scratch_;
};

// out = norm(x)
class Normalise : public Op {
  public:
    Normalise(Buffer *x, const float *weight, float eps, Buffer *out, int64_t width)
        : x_(x), weight_(weight), eps_(eps), out_(out), width_(width) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    Buffer *const x_;
    const float *const weight_;
    const float eps_;
    Buffer *const out_;
    const int64_t width_;
};

// target += factor · x, or with a norm's weight factor · norm(x), which x is afterwards.
class AddTo : public Op {
  public:
    AddTo(Buffer *x, const float *norm_weight, float eps, Buffer *target, float factor, int64_t width)
        : x_(x), weight_(norm_weight), eps_(eps), target_(target), factor_(factor), width_(width) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    Buffer *const x_;
    const float *const weight_; // null: no norm
    const float eps_;
    Buffer *const target_;
    const float factor_;
    const int64_t width_;
};

// out = activation(gate) · up
class Gated : public Op {
  public:
    Gated(Source source, Buffer *out) : source_(source), out_(out) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    const Source source_;
    Buffer *const out_;
};

struct HeadCounts {
    int queries, keys, dim;
};

// Norms of queries and keys, rotation, and keys and values into the pool.
struct QkvSteps {
    const float *q_norm = nullptr, *k_norm = nullptr;
    float eps = 0;
    bool whole = false; // all heads of a token are normalised together
    const float *cos = nullptr, *sin = nullptr; // [positions][half]
    int half = 0;
};
class FinishQkv : public Op {
  public:
    FinishQkv(Buffer *qkv, HeadCounts heads, QkvSteps steps, KvGroup *group, int layer)
        : qkv_(qkv), heads_(heads), steps_(steps), group_(group), layer_(layer) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    void normalise(const Kernels &kernels, float *heads, const float *weight, int count) const;

    Buffer *const qkv_;
    const HeadCounts heads_;
    const QkvSteps steps_;
    KvGroup *const group_;
    const int layer_; // in its group
};

class Attend : public Op {
  public:
    Attend(Buffer *qkv, HeadCounts heads, Buffer *out, AttentionPlan *plan, int layer, float scale, float softcap,
           const float *sinks)
        : qkv_(qkv), heads_(heads), out_(out), plan_(plan), group_(plan->group), layer_(layer), scale_(scale),
          softcap_(softcap), sinks_(sinks) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    Attention attention(const Step &step, const AttentionItem &item) const;

    Buffer *const qkv_;
    const HeadCounts heads_;
    Buffer *const out_;
    const AttentionPlan *const plan_;
    const KvGroup *const group_;
    const int layer_; // in its group
    const float scale_, softcap_;
    const float *const sinks_;
};

// Splits the attention of a step into items.
void plan_attention(const Step &step, AttentionPlan &plan, int query_heads);

// Each row's top_k experts by softmax(logits), and their weights.
class Route : public Op {
  public:
    Route(Buffer *logits, Buffer *chosen, Buffer *weights, int experts, int top_k, bool normalised)
        : logits_(logits), chosen_(chosen), weights_(weights), experts_(experts), top_k_(top_k),
          normalised_(normalised) {}
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    void choose(const float *logits, int32_t *chosen, float *weights) const;

    Buffer *const logits_, *const chosen_, *const weights_; // chosen: int32
    const int experts_, top_k_;
    const bool normalised_;
};

// out = the weighted sum of what each row's experts make of x, in ascending order of the experts.
class Experts : public Op {
  public:
    struct Settings {
        Source x, gated;
        Buffer *chosen, *weights, *out;
        int top_k, max_rows;
        bool add; // to `out`, times `factor`
        float factor;
    };
    Experts(Settings settings, std::vector<Product> gate_ups, std::vector<Product> downs, Scratch *scratch);
    SlotNeeds needs() const;
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    struct Active {
        int expert, first, last; // slots
    };
    void group(const Step &step);
    void prepare(const Step &step, const Source &source, int64_t index, const std::vector<Product> &products,
                 const std::vector<PanelStore> &stores, int slot, Scratch::Own &own) const;
    void multiply(const Step &step, const std::vector<Product> &products, const std::vector<PanelStore> &stores,
                  const Buffer &out, int chunk) const;
    void combine(const Step &step, int64_t row) const;
    int most_active(const Step &step) const;
    int pieces(const Step &step) const;
    const Active &active_of(int slot) const;

    const Settings settings_;
    const std::vector<Product> gate_ups_, downs_;
    Scratch *const scratch_;
    // Slots are in ascending order of experts, then of rows.
    std::vector<Active> active_;
    std::vector<int32_t> row_of_, active_index_, slots_of_; // slots_of_: [rows][top_k] in ascending order
    std::vector<float> weight_of_;
};

// Logits of some rows, and which is the largest.
class Head : public Op {
  public:
    struct Settings {
        Source source;
        float scale, softcap;
        int threads;
    };
    Head(Settings settings, Product product, Scratch *scratch);
    // What the next step wants: of each row its logits where `logits` is not null, else what is in `largest` afterwards.
    void want(const int32_t *rows, int count, float *logits);
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;
    // The largest logit's index, the first of equal ones; -1 where a logit is not a finite number.
    int32_t largest(int row) const;

  private:
    struct Best {
        float value;
        int32_t index; // -1: not finite
    };
    int chunks_at_most() const;
    void finish(const Kernels &kernels, float *logits, Step::Range range, Best &best) const;

    const Settings settings_;
    const Product product_;
    Scratch *const scratch_;
    const int32_t *rows_ = nullptr;
    int count_ = 0;
    float *logits_ = nullptr;
    Memory own_logits_; // [kHeadRows][vocabulary]
    std::vector<Best> best_; // [rows][chunks]
};

// Which rows of a buffer hold finite numbers alone.
class Finite : public Op {
  public:
    Finite(Buffer *x, int64_t width) : x_(x), width_(width) {}
    void set_result(uint8_t *result) { result_ = result; }
    void plan(const Step &step, std::vector<int> &chunks) override;
    void run(const Step &step, int phase, int chunk, int thread) override;

  private:
    Buffer *const x_;
    const int64_t width_;
    uint8_t *result_ = nullptr;
};

} // namespace appliance
