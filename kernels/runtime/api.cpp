// The C interface through which Python builds a model and runs its steps (kernels/runtime/model.py).
#include <exception>
#include <new>

#include "export.h"
#include "model.h"

using namespace appliance;

// Raised with every change of what is exported, in Python, too (kernels/native.py).
APPLIANCE_EXPORT int appliance_abi(void) { return 3; }

namespace {

struct SourceSpec {
    int32_t kind, buffer, activation;
    float eps, alpha, limit;
    int64_t width;
    const float *weight;
};

// 0, or 1 where memory or threads are lacking: exceptions must not cross into C.
template <typename Function> int guarded(Function &&function) {
    try {
        function();
        return 0;
    } catch (const std::exception &) {
        return 1;
    }
}

Source source_of(Model &model, const SourceSpec &spec) {
    Source source;
    source.kind = Source::Kind(spec.kind);
    source.buffer = spec.buffer < 0 ? nullptr : model.buffer(spec.buffer);
    source.width = spec.width;
    source.weight = spec.weight;
    source.eps = spec.eps;
    source.activation = Activation(spec.activation);
    source.alpha = spec.alpha;
    source.limit = spec.limit;
    return source;
}

} // namespace

APPLIANCE_EXPORT Model *appliance_model_new(int threads, int max_rows) {
    return new (std::nothrow) Model(threads, max_rows);
}

APPLIANCE_EXPORT void appliance_model_free(Model *model) { delete model; }

// -1 where there is no memory for it.
APPLIANCE_EXPORT int appliance_model_buffer(Model *model, int64_t width) {
    int index = -1;
    guarded([&] { index = model->add_buffer(width); });
    return index;
}

APPLIANCE_EXPORT int appliance_model_group(Model *model, const KvShape *shape, uint8_t *pool) {
    return model->add_group(*shape, pool);
}

APPLIANCE_EXPORT int appliance_model_product(Model *model, const Matrix *const *parts, int count, const float *bias,
                                             int precision) {
    Product product;
    for (int i = 0; i < count; ++i)
        product.add(*parts[i], Precision(precision));
    product.set_bias(bias);
    return model->add_product(std::move(product));
}

APPLIANCE_EXPORT void appliance_model_embed(Model *model, const Matrix *matrix, int out, float scale) {
    model->add(std::make_unique<Embed>(*matrix, model->buffer(out), scale));
}

APPLIANCE_EXPORT void appliance_model_linear(Model *model, const SourceSpec *source, int product, int out, int add,
                                             float factor) {
    model->add(std::make_unique<Linear>(source_of(*model, *source), model->product(product), model->buffer(out), add,
                                        factor, model->scratch()));
}

APPLIANCE_EXPORT void appliance_model_norm(Model *model, int x, const float *weight, float eps, int out,
                                           int64_t width) {
    model->add(std::make_unique<Normalise>(model->buffer(x), weight, eps, model->buffer(out), width));
}

// norm_weight: null where x is added as it is.
APPLIANCE_EXPORT void appliance_model_add(Model *model, int x, const float *norm_weight, float eps, int target,
                                          float factor, int64_t width) {
    model->add(std::make_unique<AddTo>(model->buffer(x), norm_weight, eps, model->buffer(target), factor, width));
}

APPLIANCE_EXPORT void appliance_model_gated(Model *model, const SourceSpec *source, int out) {
    model->add(std::make_unique<Gated>(source_of(*model, *source), model->buffer(out)));
}

APPLIANCE_EXPORT void appliance_model_qkv(Model *model, int qkv, const HeadCounts *heads, const QkvSteps *steps,
                                          int group, int layer) {
    model->add(std::make_unique<FinishQkv>(model->buffer(qkv), *heads, *steps, model->group(group), layer));
}

APPLIANCE_EXPORT void appliance_model_attend(Model *model, int qkv, const HeadCounts *heads, int out, int group,
                                             int layer, int window, float scale, float softcap, const float *sinks) {
    model->set_query_heads(heads->queries);
    model->add(std::make_unique<Attend>(model->buffer(qkv), *heads, model->buffer(out),
                                        model->attention_plan(group, window), layer, scale, softcap, sinks));
}

APPLIANCE_EXPORT void appliance_model_route(Model *model, int logits, int chosen, int weights, int experts, int top_k,
                                            int normalised) {
    model->add(std::make_unique<Route>(model->buffer(logits), model->buffer(chosen), model->buffer(weights), experts,
                                       top_k, normalised));
}

// The products of expert i are gate_ups[i] and downs[i].
APPLIANCE_EXPORT void appliance_model_experts(Model *model, const SourceSpec *x, const SourceSpec *gated, int chosen,
                                              int weights, int out, int top_k, int add, float factor,
                                              const int32_t *gate_ups, const int32_t *downs, int count) {
    std::vector<Product> gate_up_products, down_products;
    for (int i = 0; i < count; ++i) {
        gate_up_products.push_back(model->product(gate_ups[i]));
        down_products.push_back(model->product(downs[i]));
    }
    const Experts::Settings settings{source_of(*model, *x),
                                     source_of(*model, *gated),
                                     model->buffer(chosen),
                                     model->buffer(weights),
                                     model->buffer(out),
                                     top_k,
                                     model->max_rows(),
                                     bool(add),
                                     factor};
    model->add_experts(std::make_unique<Experts>(settings, std::move(gate_up_products), std::move(down_products),
                                                 model->scratch()));
}

APPLIANCE_EXPORT int appliance_model_head(Model *model, const SourceSpec *source, int product, float scale,
                                          float softcap) {
    const Head::Settings settings{source_of(*model, *source), scale, softcap, model->threads()};
    return guarded(
        [&] { model->set_head(std::make_unique<Head>(settings, model->product(product), model->scratch())); });
}

APPLIANCE_EXPORT int appliance_model_finish(Model *model, int hidden, int64_t width) {
    return guarded([&] { model->finish(hidden, width); });
}

APPLIANCE_EXPORT int appliance_model_step(Model *model, const StepInput *input) {
    return guarded([&] { model->run_step(*input); });
}

APPLIANCE_EXPORT int appliance_model_logits(Model *model, const int32_t *rows, int count, float *logits) {
    return guarded([&] { model->run_logits(rows, count, logits); });
}
