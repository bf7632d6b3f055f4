// Paged attention for Python: many tokens and many sequences a call, one after another.
#include <cstring>

#include "../runtime/export.h"
#include "../runtime/kernels.h"

namespace appliance {

Segments segments(const Attention &a) {
    const int first = a.window > 0 && a.first_position >= a.window ? a.first_position - a.window + 1 : 0;
    return {first / kKvSegment, (a.first_position + a.tokens - 1) / kKvSegment + 1};
}

} // namespace appliance

using namespace appliance;

APPLIANCE_EXPORT int64_t appliance_kv_tile_bytes(const KvShape *shape) { return tile_bytes(*shape); }
APPLIANCE_EXPORT int64_t appliance_kv_plane_bytes(const KvShape *shape) { return plane_bytes(*shape); }
APPLIANCE_EXPORT int64_t appliance_kv_block_bytes(const KvShape *shape) { return kv_block_bytes(*shape); }

// Floats that `appliance_attend_segments` needs.
APPLIANCE_EXPORT int64_t appliance_attention_partials(const Attention *item) {
    const Segments all = segments(*item);
    return (all.last - all.first) * int64_t(item->tokens) * item->query_heads * partial_floats(item->shape);
}

// Keys and values of `tokens` tokens in all heads, each [token][kv head][head_dim]; `layer`: see Attention. The layer's
// part of a block is cleared at its first token.
APPLIANCE_EXPORT void appliance_kv_write(const KvShape *shape, uint8_t *layer, const int32_t *blocks,
                                         const int32_t *offsets, int64_t tokens, const float *keys,
                                         const float *values) {
    const auto write = kernels().attention->write;
    for (int64_t token = 0; token < tokens; ++token) {
        if (offsets[token] == 0)
            std::memset(layer + blocks[token] * kv_block_bytes(*shape), 0, plane_bytes(*shape) * 2 * shape->kv_heads);
        for (int32_t head = 0; head < shape->kv_heads; ++head) {
            const int64_t at = (token * shape->kv_heads + head) * shape->head_dim;
            write(*shape, layer, head, blocks[token], offsets[token], keys + at, values + at);
        }
    }
}

APPLIANCE_EXPORT void appliance_attend(const Attention *items, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        kernels().attention->attend(items[i]);
}

// The same through partial states: segments from the last to the first, then merged.
APPLIANCE_EXPORT void appliance_attend_segments(const Attention *item, float *partials) {
    const Segments all = segments(*item);
    const int64_t floats = int64_t(item->tokens) * item->query_heads * partial_floats(item->shape);
    for (int32_t segment = all.last - 1; segment >= all.first; --segment)
        kernels().attention->attend_segment(*item, segment, partials + (segment - all.first) * floats);
    kernels().attention->merge(*item, partials);
}
