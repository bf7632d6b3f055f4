#include "cpu.h"

#include "../runtime/simd.h"
#include "tiles.h"

namespace appliance::APPLIANCE_ISA {

static inline int lower(int a, int b) { return a < b ? a : b; }
static inline int higher(int a, int b) { return a > b ? a : b; }

// ---- Writing ----

// 0, or not a number where one of the values isn't finite.
static float flaw(const float *x, int count) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i)
        sum += x[i] * 0.0f;
    return sum;
}

// value = code · the returned scale, the largest of them ±127; a value that is not finite makes the scale not a number.
static float quantise(const float *x, int count, int8_t *codes) {
    float largest = 0.0f;
    for (int i = 0; i < count; ++i)
        largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
    const float bad = flaw(x, count);
    // Smaller ones have no reciprocal.
    const float factor = bad == 0.0f && largest > 1e-35f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < count; ++i)
        codes[i] = factor > 0.0f ? int8_t(std::lrintf(x[i] * factor)) : int8_t(0);
    return largest / 127.0f + bad;
}

static void write_floats(const KvShape &shape, uint8_t *keys, uint8_t *values, int lane, const float *key,
                         const float *value) {
    const int width = padded_head_dim(shape);
    if (shape.type == KvType::F32) {
        float *k = reinterpret_cast<float *>(keys), *v = reinterpret_cast<float *>(values);
        for (int d = 0; d < shape.head_dim; ++d)
            k[d * kLanes + lane] = key[d];
        std::memcpy(v + lane * width, value, sizeof(float) * shape.head_dim);
        return;
    }
    uint16_t *k = reinterpret_cast<uint16_t *>(keys), *v = reinterpret_cast<uint16_t *>(values);
    for (int d = 0; d < shape.head_dim; ++d) {
        k[(d / 2 * kLanes + lane) * 2 + (d & 1)] = bf16(key[d]);
        v[(lane / 2 * width + d) * 2 + (lane & 1)] = bf16(value[d]);
    }
}

static void write_codes(const KvShape &shape, uint8_t *keys, uint8_t *values, int lane, const float *key,
                        const float *value) {
    const int width = padded_head_dim(shape);
    int8_t codes[kMaxHeadDim] = {};
    reinterpret_cast<float *>(keys + width * kKvTile)[lane] = quantise(key, shape.head_dim, codes);
    for (int d = 0; d < width; ++d)
        keys[(d / 4 * kLanes + lane) * 4 + (d & 3)] = uint8_t(codes[d] + 128);
    reinterpret_cast<float *>(values + width * kKvTile)[lane] =
        quantise(value, shape.head_dim, reinterpret_cast<int8_t *>(values) + lane * width);
}

static void write(const KvShape &shape, uint8_t *layer, int32_t kv_head, int32_t block, int32_t offset,
                  const float *key, const float *value) {
    const int64_t plane = plane_bytes(shape);
    uint8_t *keys = layer + block * kv_block_bytes(shape) + kv_head * plane;
    uint8_t *values = keys + shape.kv_heads * plane;
    const int64_t tile = offset / kKvTile * tile_bytes(shape);
    const auto write_token = shape.type == KvType::INT8 ? write_codes : write_floats;
    write_token(shape, keys + tile, values + tile, offset % kKvTile, key, value);
}

// ---- Attending ----

// Where the tiles of a sequence's keys and values lie.
struct Places {
    const Attention &attention;
    int64_t tile = tile_bytes(attention.shape), plane = plane_bytes(attention.shape),
            block = kv_block_bytes(attention.shape), to_values = plane * attention.shape.kv_heads;
    int shift = __builtin_ctz(attention.shape.block_size / kKvTile);

    // Null where the table has a hole.
    const uint8_t *keys(int index) const {
        const int32_t at = attention.table[index >> shift];
        const int inside = index & ((1 << shift) - 1);
        return at < 0 ? nullptr : attention.layer + at * block + attention.kv_head * plane + inside * tile;
    }
};

static void prepare(const Attention &a, int first_row, int count, Rows &rows) {
    const int head_dim = a.shape.head_dim, width = padded_head_dim(a.shape);
    rows.count = count;
    for (int r = 0; r < count; ++r) {
        const int token = (first_row + r) / a.query_heads, head = (first_row + r) % a.query_heads;
        const int position = a.first_position + token;
        rows.low[r] = a.window ? higher(0, position - a.window + 1) : 0;
        rows.high[r] = position + 1;
        const float *query = a.queries + token * a.query_stride + int64_t(head) * head_dim;
        alignas(64) uint32_t words[kMaxHeadDim];
        int lines = width;
        if (a.shape.type == KvType::INT8) {
            int8_t codes[kMaxHeadDim] = {};
            rows.scales[r] = quantise(query, head_dim, codes) * a.scale;
            int32_t sum = 0;
            for (int d = 0; d < head_dim; ++d)
                sum += codes[d];
            rows.offsets[r] = 128 * sum;
            lines = width / 4;
            std::memcpy(words, codes, width);
        } else {
            const Floats scale = splat(a.scale);
            const bool pairs = kDotBf16 && a.shape.type == KvType::BF16;
            for (int d = 0; d < width; d += kLanes) {
                const Floats lanes = load_first(query + d, lower(kLanes, head_dim - d)) * scale;
#if defined(__AVX512BF16__)
                if (pairs)
                    store_bf16(words + d / 2, lanes);
                else
#endif
                    store(reinterpret_cast<float *>(words) + d, lanes);
            }
            lines = pairs ? width / 2 : width;
        }
        for (int line = 0; line < lines; ++line)
            rows.queries[line * count + r] = words[line];
    }
}

// Scores of the chunk's tokens, kHidden for those that a row doesn't see.
template <KvType Type, int Count>
static void score(const Attention &a, const Rows &rows, int first_token, Chunk &chunk) {
    const int width = padded_head_dim(a.shape);
    alignas(64) static const int32_t kOrder[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int tile = 0; tile < chunk.tiles; ++tile) {
        Floats scores[Count];
        if constexpr (Type == KvType::INT8)
            score_int8_tile(chunk.keys[tile], chunk.values[tile], width, rows, scores);
        else
            score_tile<Type>(chunk.keys[tile], chunk.values[tile], width, rows, scores);
        if (a.softcap != 0.0f)
            for (int r = 0; r < Count; ++r) // what is infinite must not become finite
                scores[r] = fma(scores[r], splat(0.0f), splat(a.softcap) * tanh(scores[r] / splat(a.softcap)));
        const int start = first_token + tile * kKvTile;
        if (start < rows.low[Count - 1] || start + kKvTile > rows.high[0]) {
            const Ints tokens = splat(int32_t(start)) + load(kOrder);
            for (int r = 0; r < Count; ++r) {
                const Mask hidden =
                    less(tokens, splat(rows.low[r])) | less(splat(int32_t(rows.high[r] - 1)), tokens);
                scores[r] = select(hidden, splat(kHidden), scores[r]);
            }
        }
        UNROLL
        for (int r = 0; r < Count; ++r)
            store(&chunk.weights[r][tile * kKvTile], scores[r]);
    }
}

// Scores of row `r` become weights, its state so far fades accordingly. The rest are the row's: `totals` has 16 lanes.
template <KvType Type>
static void weigh(Chunk &chunk, int r, int width, float *sums, float *highest, float *totals) {
    float *scores = chunk.weights[r];
    const int count = chunk.tiles * kKvTile;
    Floats top = splat(kHidden);
    for (int i = 0; i < count; i += kLanes)
        top = max(top, load(scores + i));
    const float above = reduce_max(top);
    const float now = above > *highest ? above : *highest;
    Floats total = load(totals);
    if (now != *highest) {
        const Floats fade = exp(splat(*highest - now));
        total = total * fade;
        for (int d = 0; d < width; d += kLanes)
            store(sums + d, load(sums + d) * fade);
        *highest = now;
    }
    for (int i = 0; i < count; i += kLanes) {
        const Floats score = load(scores + i);
        Floats weight = exp(score - splat(now));
        weight = select(less(score, splat(kLowestSeen)), splat(0.0f), weight);
        total = fma(score, splat(0.0f), total + weight); // infinite scores must show
        if constexpr (Type == KvType::INT8)
            weight = weight * load(reinterpret_cast<const float *>(chunk.values[i / kKvTile] + width * kKvTile));
#if defined(__AVX512BF16__)
        if constexpr (Type == KvType::BF16)
            store_bf16(chunk.weights_bf16[r] + i, weight);
        else
#endif
            store(scores + i, weight);
    }
    store(totals, total);
}

template <KvType Type, int Count>
static void weigh_values(const Attention &a, const Chunk &chunk, float *sums, int64_t stride) {
    const int width = padded_head_dim(a.shape);
    constexpr int kColumns = kWide || Count == 1 ? 4 : Count <= 3 ? 2 : 1;
    int column = 0;
    for (; column + kColumns * kLanes <= width; column += kColumns * kLanes)
        add_values<Type, Count, kColumns>(chunk, width, column, sums, stride);
    if constexpr (kColumns > 1)
        for (; column < width; column += kLanes)
            add_values<Type, Count, 1>(chunk, width, column, sums, stride);
}

// The partial state of `Count` rows over one segment; keys of tiles up to `last_tile` are worth fetching.
template <KvType Type, int Count>
static void attend_rows(const Attention &a, const Rows &rows, int segment, int last_tile, float *partial) {
    const Places places{a};
    const int width = padded_head_dim(a.shape);
    const int64_t stride = partial_floats(a.shape);
    alignas(64) float totals[Count][kLanes];
    float highest[Count];
    std::memset(totals, 0, sizeof totals);
    for (int r = 0; r < Count; ++r) {
        std::memset(partial + r * stride, 0, sizeof(float) * width);
        highest[r] = -INFINITY;
    }
    Chunk chunk;
    for (int start = segment * kKvSegment; start < (segment + 1) * kKvSegment; start += kChunk) {
        const int first = higher(start, rows.low[0]) / kKvTile;
        const int last = (lower(start + kChunk, rows.high[Count - 1]) + kKvTile - 1) / kKvTile;
        if (first >= last)
            continue;
        chunk.tiles = last - first;
        for (int i = 0; i < chunk.tiles; ++i) {
            chunk.keys[i] = places.keys(first + i);
            chunk.values[i] = chunk.keys[i] + places.to_values;
            const int next = first + i + kChunkTiles;
            chunk.next_keys[i] = next < last_tile ? places.keys(next) : chunk.keys[i];
        }
        score<Type, Count>(a, rows, first * kKvTile, chunk);
        for (int r = 0; r < Count; ++r) {
            if (rows.low[r] < start + kChunk && rows.high[r] > start) {
                weigh<Type>(chunk, r, width, partial + r * stride, &highest[r], totals[r]);
            } else {
                std::memset(chunk.weights[r], 0, sizeof chunk.weights[r]);
                std::memset(chunk.weights_bf16[r], 0, sizeof chunk.weights_bf16[r]);
            }
        }
        weigh_values<Type, Count>(a, chunk, partial, stride);
    }
    for (int r = 0; r < Count; ++r) {
        partial[r * stride + width] = highest[r];
        partial[r * stride + width + 1] = reduce_add(load(totals[r]));
    }
}

using AttendRows = void (*)(const Attention &, const Rows &, int segment, int last_tile, float *partial);

template <KvType Type> static AttendRows for_rows(int count) {
    switch (count) {
    case 1:
        return attend_rows<Type, 1>;
    case 2:
        return attend_rows<Type, 2>;
    case 3:
        return attend_rows<Type, 3>;
    case 4:
        return attend_rows<Type, 4>;
    default:
        if constexpr (kMaxRows > 4)
            return count == 5 ? attend_rows<Type, 5> : attend_rows<Type, 6>;
        return nullptr;
    }
}

static AttendRows for_rows(KvType type, int count) {
    switch (type) {
    case KvType::F32:
        return for_rows<KvType::F32>(count);
    case KvType::BF16:
        return for_rows<KvType::BF16>(count);
    case KvType::INT8:
        return for_rows<KvType::INT8>(count);
    }
    return nullptr;
}

// ---- Merging ----

// The state before the first segment: nothing, or the sink.
static void start(const Attention &a, int head, float *state) {
    const int width = padded_head_dim(a.shape);
    std::memset(state, 0, sizeof(float) * width);
    state[width] = a.sinks ? a.sinks[head] : -INFINITY;
    state[width + 1] = a.sinks ? 1.0f : 0.0f;
}

// Adds a later segment to the state of a row.
static void join(float *state, const float *partial, int width) {
    const float *more = partial + width;
    float *has = state + width;
    if (more[1] == 0.0f)
        return;
    const float highest = more[0] > has[0] ? more[0] : has[0];
    const Floats fade = exp(splat(has[0] - highest)), share = exp(splat(more[0] - highest));
    for (int d = 0; d < width; d += kLanes)
        store(state + d, fma(load(partial + d), share, load(state + d) * fade));
    alignas(64) float total[kLanes];
    store(total, fma(splat(more[1]), share, splat(has[1]) * fade));
    has[0] = highest;
    has[1] = total[0];
}

static void finish(const Attention &a, int row, const float *state) {
    const int head_dim = a.shape.head_dim, width = padded_head_dim(a.shape);
    float *out = a.out + row / a.query_heads * a.out_stride + int64_t(row % a.query_heads) * head_dim;
    const Floats factor = splat(1.0f / state[width + 1]);
    for (int d = 0; d < head_dim; d += kLanes) {
        // Whether zeros with a sign were added to a zero depends on who else was in the tile: + 0 takes the sign away.
        const Floats lanes = load(state + d) * factor + splat(0.0f);
        if (d + kLanes <= head_dim)
            store(out + d, lanes);
        else
            store_first(out + d, lanes, head_dim - d);
    }
}

// ---- The table ----

static inline int row_count(const Attention &a) { return a.tokens * a.query_heads; }

static void attend_segment(const Attention &a, int32_t segment, float *partial) {
    Rows rows;
    for (int row = 0; row < row_count(a); row += kMaxRows) {
        const int count = lower(kMaxRows, row_count(a) - row);
        prepare(a, row, count, rows);
        const int last_tile = (segment + 1) * (kKvSegment / kKvTile);
        for_rows(a.shape.type, count)(a, rows, segment,
                                      lower(last_tile, (rows.high[count - 1] + kKvTile - 1) / kKvTile),
                                      partial + row * partial_floats(a.shape));
    }
}

static void attend(const Attention &a) {
    const int width = padded_head_dim(a.shape);
    const int64_t stride = partial_floats(a.shape);
    Rows rows;
    alignas(64) float states[kMaxRows * (kMaxHeadDim + 16)], partial[kMaxRows * (kMaxHeadDim + 16)];
    for (int row = 0; row < row_count(a); row += kMaxRows) {
        const int count = lower(kMaxRows, row_count(a) - row);
        prepare(a, row, count, rows);
        for (int r = 0; r < count; ++r)
            start(a, (row + r) % a.query_heads, states + r * stride);
        const AttendRows compute = for_rows(a.shape.type, count);
        const int last_tile = (rows.high[count - 1] + kKvTile - 1) / kKvTile;
        for (int segment = rows.low[0] / kKvSegment; segment * kKvSegment < rows.high[count - 1]; ++segment) {
            compute(a, rows, segment, last_tile, partial);
            for (int r = 0; r < count; ++r)
                join(states + r * stride, partial + r * stride, width);
        }
        for (int r = 0; r < count; ++r)
            finish(a, row + r, states + r * stride);
    }
}

static void merge(const Attention &a, const float *partials) {
    const int width = padded_head_dim(a.shape);
    const int64_t stride = partial_floats(a.shape);
    const Segments all = segments(a);
    alignas(64) float state[kMaxHeadDim + 16];
    for (int row = 0; row < row_count(a); ++row) {
        start(a, row % a.query_heads, state);
        for (int segment = 0; segment < all.last - all.first; ++segment)
            join(state, partials + (int64_t(segment) * row_count(a) + row) * stride, width);
        finish(a, row, state);
    }
}

extern const AttentionKernels attention = {write, attend, attend_segment, merge};

} // namespace appliance::APPLIANCE_ISA
