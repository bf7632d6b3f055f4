// Products of rows with matrices, and how rows are made ready for them.
#pragma once

#include <vector>

#include "step.h"

namespace appliance {

enum class Precision : int32_t { INT8, BF16, F32 };

// What the rows of a product are made of.
struct Source {
    enum class Kind : int32_t { PLAIN, NORM, GATED } kind = Kind::PLAIN;
    const Buffer *buffer = nullptr;
    int64_t width = 0; // of a row as it is multiplied; GATED reads two halves of this width
    const float *weight = nullptr; // NORM
    float eps = 0;
    Activation activation = Activation::SILU; // GATED
    float alpha = 0, limit = 0;
};

// What a matrix needs its rows to be. Matrices that need the same share a panel.
struct PanelShape {
    int64_t columns, width;
    int chunk;
    const int32_t *inputs;
    Precision precision;

    bool operator==(const PanelShape &other) const {
        return columns == other.columns && width == other.width && chunk == other.chunk && inputs == other.inputs &&
               precision == other.precision;
    }
};

// Rows of a store that are a panel.
struct PanelRows {
    int64_t first, count;
};

// Memory for a panel of up to so many rows and columns.
class PanelStore {
  public:
    PanelStore(int64_t rows, int64_t columns);
    Panel view(const PanelShape &shape, PanelRows rows) const;
    // Fills row `row` of these. `scratch` has room for the columns.
    void prepare(const Kernels &kernels, const PanelShape &shape, const float *x, PanelRows rows, int64_t row,
                 float *scratch) const;

  private:
    int64_t codes_stride_, values_stride_, groups_stride_;
    Memory codes_, values_, scales_, sums_;
};

// Matrices stacked along their rows.
class Product {
  public:
    void add(const Matrix &matrix, Precision precision);
    void set_bias(const float *bias) { bias_ = bias; }

    int64_t outputs() const { return outputs_; }
    int64_t blocks() const { return blocks_; }
    int64_t max_columns() const;
    const std::vector<PanelShape> &panels() const { return panels_; }
    // Blocks of 16 outputs for the rows that are ready in `stores`, one for each of `panels()`.
    void multiply(const Kernels &kernels, const std::vector<PanelStore> &stores, PanelRows rows, const Target &target,
                  Step::Range blocks) const;

  private:
    struct Part {
        Matrix matrix;
        size_t panel;
        int64_t first_output, first_block, blocks;
    };
    std::vector<Part> parts_;
    std::vector<PanelShape> panels_;
    const float *bias_ = nullptr;
    int64_t outputs_ = 0, blocks_ = 0;
};

// What the experts of a layer need room for; a slot is a row of one expert.
struct SlotNeeds {
    int64_t slots;
    size_t panels;
    int64_t columns, gate_up, down;
};

struct Slots {
    std::vector<PanelStore> panels;
    Buffer gate_up, down;
};

// What threads work in; one for a model, whose layers take turns.
struct Scratch {
    std::vector<PanelStore> shared; // one for each panel of a product
    Slots slots;
    struct Own {
        std::vector<PanelStore> panels;
        Memory row, padded;
        uint64_t step = 0; // what the panels hold
        const void *op = nullptr;
        int phase = 0;
    };
    std::vector<Own> own; // of each thread

    // Whether the thread has to prepare its own panels for this phase, which it is taken to do then.
    bool claim(int thread, uint64_t step, const void *op, int phase);
};

// Row `index` of the source, made ready as row `row` of these rows of the stores.
void prepare_row(const Kernels &kernels, const Source &source, int64_t index, const std::vector<PanelShape> &panels,
                 const std::vector<PanelStore> &stores, PanelRows rows, int64_t row, Scratch::Own &own);

} // namespace appliance
