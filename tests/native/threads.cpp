// A small model of random weights, taken through the same ragged steps by 1, 2 and 4 threads, which are taken off their
// cores at random points: every bit of its results is that of one thread. Built with a sanitizer by `make sanitize`.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include <dirent.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../kernels/linear/pack.h"
#include "../../kernels/runtime/model.h"

using namespace appliance;

extern "C" int appliance_force_isa(const char *name);
extern "C" void appliance_pack_quantised(const Matrix *matrix, const QuantisedSource *source);
extern "C" void appliance_pack_dense(const Matrix *matrix, const void *values, int64_t columns);

namespace {

constexpr int kSteps = 300, kMaxRows = 48, kSequences = 5, kTokens = 640, kBlock = 32;
constexpr int kHidden = 64, kInner = 96, kVocabulary = 301, kExperts = 6, kTopK = 2;
constexpr HeadCounts kHeads{4, 2, 16};
constexpr int kQkv = 128, kHalf = 8;

using Random = std::mt19937;

void sleep_for(unsigned microseconds) {
    const timespec time{0, long(microseconds) * 1000};
    nanosleep(&time, nullptr);
}

// Interrupts threads of the process one after another, each for a while.
class Disturber {
  public:
    Disturber() {
        struct sigaction action {};
        action.sa_handler = [](int) {
            timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            sleep_for(unsigned(now.tv_nsec % 300));
        };
        action.sa_flags = SA_RESTART;
        sigaction(SIGUSR1, &action, nullptr);
        thread_ = std::thread([this] { disturb(); });
    }
    ~Disturber() {
        done_ = true;
        thread_.join();
    }

  private:
    void disturb() {
        Random random(1);
        const long self = syscall(SYS_gettid);
        while (!done_) {
            DIR *tasks = opendir("/proc/self/task");
            while (const dirent *task = readdir(tasks)) {
                const long thread = std::atol(task->d_name);
                if (thread > 0 && thread != self && random() % 2)
                    syscall(SYS_tgkill, getpid(), thread, SIGUSR1);
            }
            closedir(tasks);
            sleep_for(50 + random() % 400);
        }
    }

    std::atomic<bool> done_{false};
    std::thread thread_;
};

struct Shape {
    int64_t rows, columns;
};

// What the models share, and what their operations point to.
class Weights {
  public:
    Weights() {
        for (int position = 0; position < kTokens; ++position)
            for (int i = 0; i < kHalf; ++i) {
                const double angle = position * std::pow(10000.0, -double(i) / kHalf);
                cos.push_back(float(std::cos(angle)));
                sin.push_back(float(std::sin(angle)));
            }
        norm = floats(kQkv, 1.0f);
        bias = floats(kQkv, 0.5f);
        sinks = floats(kHeads.queries, 1.0f);
        for (int column = 0; column < kHidden; ++column)
            shuffled.push_back(column);
        std::shuffle(shuffled.begin(), shuffled.end(), random_);
    }

    Matrix quantised(Shape shape, int bits, const int32_t *inputs = nullptr) {
        Matrix matrix = described(shape);
        matrix.group = 32;
        matrix.codes = bits == 4 ? Codes::U4 : Codes::U8;
        matrix.scales = Scales::F32;
        matrix.constant = float(1 << (bits - 1));
        matrix.inputs = inputs;
        std::vector<uint8_t> codes(size_t(shape.rows * shape.columns * bits / 8));
        for (uint8_t &byte : codes)
            byte = uint8_t(random_());
        const std::vector<float> scales = floats(shape.rows * shape.columns / 32, 0.3f / matrix.constant);
        const QuantisedSource source{codes.data(), bits,    32,      shape.columns, scales.data(),
                                     nullptr,      nullptr, nullptr, nullptr,       nullptr};
        allocate(matrix);
        appliance_pack_quantised(&matrix, &source);
        return matrix;
    }

    Matrix dense(Shape shape) {
        Matrix matrix = described(shape);
        matrix.group = int32_t(shape.columns);
        matrix.codes = Codes::F32;
        allocate(matrix);
        appliance_pack_dense(&matrix, floats(shape.rows * shape.columns, 0.5f).data(), shape.columns);
        return matrix;
    }

    std::vector<float> cos, sin, norm, bias, sinks;
    std::vector<int32_t> shuffled;

  private:
    static Matrix described(Shape shape) {
        Matrix matrix{};
        matrix.rows = shape.rows;
        matrix.columns = matrix.input_width = shape.columns;
        return matrix;
    }

    void allocate(Matrix &matrix) {
        memory_.emplace_back(size_t((matrix.rows + kBlockRows - 1) / kBlockRows * block_bytes(matrix)));
        matrix.data = memory_.back().as<uint8_t>();
    }

    std::vector<float> floats(int64_t count, float size) {
        std::vector<float> numbers;
        std::uniform_real_distribution<float> number(-size, size);
        for (int64_t i = 0; i < count; ++i)
            numbers.push_back(number(random_));
        return numbers;
    }

    Random random_{0};
    std::vector<Memory> memory_;
};

struct Matrices {
    explicit Matrices(Weights &weights)
        : embedding(weights.dense({kVocabulary, kHidden})), head(weights.quantised({kVocabulary, kHidden}, 8)),
          router(weights.dense({kExperts, kHidden})), gate_up(weights.quantised({2 * kInner, kHidden}, 4)),
          down(weights.quantised({kHidden, kInner}, 4)) {
        for (int layer = 0; layer < 2; ++layer) {
            queries.push_back(weights.quantised({kHeads.queries * kHeads.dim, kHidden}, 4));
            keys_values.push_back(weights.quantised({2 * kHeads.keys * kHeads.dim, kHidden}, 8));
            outputs.push_back(weights.quantised({kHidden, kHidden}, 4, weights.shuffled.data()));
        }
        for (int expert = 0; expert < kExperts; ++expert) {
            gate_ups.push_back(weights.quantised({2 * kInner, kHidden}, 4));
            downs.push_back(weights.quantised({kHidden, kInner}, 8));
        }
    }

    Matrix embedding, head, router, gate_up, down;
    std::vector<Matrix> queries, keys_values, outputs, gate_ups, downs;
};

// Two layers: full attention over bfloat16 and a dense feed-forward block; windowed attention over int8 and experts.
class Network {
  public:
    Network(const Weights &weights, const Matrices &matrices, Precision precision, int threads)
        : weights_(weights), matrices_(matrices), precision_(precision), model_(threads, kMaxRows) {
        hidden_ = model_.add_buffer(kHidden);
        model_.add(std::make_unique<Embed>(matrices.embedding, model_.buffer(hidden_), 2.0f));
        for (int layer = 0; layer < 2; ++layer) {
            const KvShape shape{layer ? KvType::INT8 : KvType::BF16, kHeads.keys, kHeads.dim, kBlock, 1};
            pools_.emplace_back(size_t(kv_block_bytes(shape)) * kSequences * (kTokens / kBlock));
            model_.add_group(shape, pools_.back().data());
            add_attention(layer);
            layer ? add_experts() : add_dense();
        }
        const Head::Settings settings{normed(), 0.5f, 30.0f, threads};
        model_.set_head(std::make_unique<Head>(settings, product({matrices.head}), model_.scratch()));
        model_.finish(hidden_, kHidden);
    }

    Model &model() { return model_; }
    const std::vector<std::vector<uint8_t>> &pools() const { return pools_; }

  private:
    Product product(const std::vector<Matrix> &parts, const float *bias = nullptr) {
        Product product;
        for (const Matrix &part : parts)
            product.add(part, precision_);
        product.set_bias(bias);
        return model_.product(model_.add_product(std::move(product)));
    }

    Source plain(int buffer, int64_t width) {
        Source source;
        source.buffer = model_.buffer(buffer);
        source.width = width;
        return source;
    }
    Source normed() {
        Source source = plain(hidden_, kHidden);
        source.kind = Source::Kind::NORM;
        source.weight = weights_.norm.data();
        source.eps = 1e-5f;
        return source;
    }
    Source gated(int buffer) {
        Source source = plain(buffer, kInner);
        source.kind = Source::Kind::GATED;
        return source;
    }

    void add_linear(Source source, Product product, int out, bool add) {
        model_.add(std::make_unique<Linear>(source, std::move(product), model_.buffer(out), add, add ? 0.7f : 1.0f,
                                            model_.scratch()));
    }

    void add_attention(int layer) {
        const int qkv = model_.add_buffer(kQkv), out = model_.add_buffer(kHidden), window = layer ? 40 : 0;
        add_linear(normed(), product({matrices_.queries[layer], matrices_.keys_values[layer]}, weights_.bias.data()),
                   qkv, false);
        QkvSteps steps;
        steps.q_norm = steps.k_norm = weights_.norm.data();
        steps.eps = 1e-6f;
        steps.cos = weights_.cos.data();
        steps.sin = weights_.sin.data();
        steps.half = kHalf;
        model_.add(std::make_unique<FinishQkv>(model_.buffer(qkv), kHeads, steps, model_.group(layer), 0));
        model_.set_query_heads(kHeads.queries);
        model_.add(std::make_unique<Attend>(model_.buffer(qkv), kHeads, model_.buffer(out),
                                            model_.attention_plan(layer, window), 0, 0.25f, layer ? 20.0f : 0.0f,
                                            layer ? weights_.sinks.data() : nullptr));
        add_linear(plain(out, kHidden), product({matrices_.outputs[layer]}), hidden_, true);
    }

    void add_dense() {
        const int gate_up = model_.add_buffer(2 * kInner), down = model_.add_buffer(kHidden);
        add_linear(normed(), product({matrices_.gate_up}), gate_up, false);
        add_linear(gated(gate_up), product({matrices_.down}), down, false);
        model_.add(std::make_unique<AddTo>(model_.buffer(down), weights_.norm.data(), 1e-5f, model_.buffer(hidden_),
                                           0.9f, kHidden));
    }

    void add_experts() {
        const int logits = model_.add_buffer(kExperts), chosen = model_.add_buffer(kTopK);
        const int weights = model_.add_buffer(kTopK);
        add_linear(normed(), product({matrices_.router}), logits, false);
        model_.add(std::make_unique<Route>(model_.buffer(logits), model_.buffer(chosen), model_.buffer(weights),
                                           kExperts, kTopK, true));
        const Experts::Settings settings{normed(), gated(logits), model_.buffer(chosen), model_.buffer(weights),
                                         model_.buffer(hidden_), kTopK, kMaxRows, true, 0.8f};
        std::vector<Product> gate_ups, downs;
        for (int expert = 0; expert < kExperts; ++expert) {
            gate_ups.push_back(product({matrices_.gate_ups[expert]}));
            downs.push_back(product({matrices_.downs[expert]}));
        }
        model_.add_experts(
            std::make_unique<Experts>(settings, std::move(gate_ups), std::move(downs), model_.scratch()));
    }

    const Weights &weights_;
    const Matrices &matrices_;
    const Precision precision_;
    int hidden_ = 0;
    std::vector<std::vector<uint8_t>> pools_; // written by the model, so they outlive it
    Model model_;
};

// Whose tokens are computed next: the next one of some sequences, longer runs of others, as long as there are rows.
class Schedule {
  public:
    // The number of rows of the step.
    int next() {
        for (std::vector<int32_t> *each : {&layout, &tokens, &tables, &head_rows})
            each->clear();
        while (tokens.empty())
            for (int sequence = 0; sequence < kSequences; ++sequence) {
                const int wanted = random_() % 3 ? 1 : 1 + int(random_() % 40);
                if (int(tokens.size()) == kMaxRows || random_() % 4 == 0)
                    continue;
                if (lengths_[sequence] == kTokens)
                    lengths_[sequence] = 0;
                add(sequence, std::min({kMaxRows - int(tokens.size()), wanted, kTokens - lengths_[sequence]}));
            }
        return int(tokens.size());
    }

    std::vector<int32_t> layout, tokens, tables, head_rows;

  private:
    void add(int sequence, int rows) {
        layout.insert(layout.end(), {int32_t(tokens.size()), rows, lengths_[sequence]});
        lengths_[sequence] += rows;
        for (int row = 0; row < rows; ++row) {
            if (row == rows - 1 || random_() % 2)
                head_rows.push_back(int32_t(tokens.size()));
            tokens.push_back(int32_t(random_() % kVocabulary));
        }
        for (int block = 0; block < kTokens / kBlock; ++block)
            tables.push_back(block * kSequences + sequence);
    }

    Random random_{2};
    int lengths_[kSequences] = {};
};

// Everything that a model says in all its steps; empty where that makes no sense.
std::vector<uint8_t> run(Network &network) {
    std::vector<uint8_t> said;
    std::set<int32_t> chosen;
    const auto say = [&](const auto &numbers) {
        const auto *bytes = reinterpret_cast<const uint8_t *>(numbers.data());
        said.insert(said.end(), bytes, bytes + numbers.size() * sizeof numbers[0]);
    };
    Schedule schedule;
    Random random(3);
    for (int step = 0; step < kSteps; ++step) {
        const int rows = schedule.next(), wanted = int(schedule.head_rows.size());
        std::vector<int32_t> largest(wanted);
        std::vector<uint8_t> finite(rows);
        const int32_t *tables[] = {schedule.tables.data(), schedule.tables.data()};
        network.model().run_step({rows, int32_t(schedule.layout.size() / 3), kTokens / kBlock, wanted,
                                  schedule.tokens.data(), schedule.layout.data(), tables, schedule.head_rows.data(),
                                  largest.data(), finite.data()});
        if (std::count(finite.begin(), finite.end(), 1) != rows)
            return {};
        chosen.insert(largest.begin(), largest.end());
        say(largest);
        if (step % 3 == 0) {
            std::vector<float> logits(size_t(wanted) * kVocabulary);
            network.model().run_logits(schedule.head_rows.data(), wanted, logits.data());
            say(logits);
        }
        if (random() % 4 == 0)
            sleep_for(random() % 1000); // long enough for threads to fall asleep
    }
    for (const auto &pool : network.pools())
        say(pool);
    return chosen.size() < kVocabulary / 4 || *chosen.begin() < 0 ? std::vector<uint8_t>() : said;
}

bool agrees(const Weights &weights, const Matrices &matrices, Precision precision) {
    Network alone(weights, matrices, precision, 1);
    const std::vector<uint8_t> expected = run(alone);
    if (expected.empty()) {
        std::fprintf(stderr, "precision %d: numbers that aren't finite, or few tokens for all\n", int(precision));
        return false;
    }
    for (int threads : {2, 4}) {
        Network network(weights, matrices, precision, threads);
        Disturber disturber;
        if (run(network) != expected) {
            std::fprintf(stderr, "precision %d: %d threads don't say what one says\n", int(precision), threads);
            return false;
        }
    }
    return true;
}

} // namespace

int main() {
    Weights weights;
    const Matrices matrices(weights);
    for (const char *isa : {"portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16"}) {
        if (!appliance_force_isa(isa))
            continue;
        for (Precision precision : {Precision::INT8, Precision::BF16})
            if (!agrees(weights, matrices, precision))
                return 1;
        std::printf("%s: %d steps by 1, 2 and 4 threads, the same bits\n", isa, kSteps);
    }
    return 0;
}
