// What a tile of rows does with tiles of keys and values, for each type of the pool.
#pragma once

#include "../runtime/simd.h"
#include "cpu.h"

#define UNROLL _Pragma("GCC unroll 8")

namespace appliance::APPLIANCE_ISA {

constexpr int kMaxRows = kWide ? 6 : 4;         // rows of queries whose sums stay in registers
constexpr int kChunk = 128;                     // tokens whose scores are held at once
constexpr int kChunkTiles = kChunk / kKvTile;
constexpr float kHidden = -3.402823466e38f;     // a score: the token is not seen
constexpr float kLowestSeen = -3.4e38f;
#if defined(__AVX512BF16__)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif

// Rows of queries: pairs of a token and a head, in order.
struct Rows {
    int count;
    int32_t low[kMaxRows], high[kMaxRows]; // a row sees tokens low … high - 1
    // What multiplies a lane of a line of keys, [line][count]: fp32, or with kDotBf16 pairs of bfloat16, or four int8.
    alignas(64) uint32_t queries[kMaxRows * kMaxHeadDim];
    float scales[kMaxRows];     // INT8: of the codes
    int32_t offsets[kMaxRows];  // INT8: what the keys' + 128 adds
};

// Keys and values of the chunk's tiles.
struct Chunk {
    int tiles;
    const uint8_t *keys[kChunkTiles], *values[kChunkTiles];
    const uint8_t *next_keys[kChunkTiles]; // of the tiles that many after these; the same where there are none
    alignas(64) float weights[kMaxRows][kChunk]; // first scores
    alignas(64) uint16_t weights_bf16[kMaxRows][kChunk];
};

// While a tile is read, the same place of one that is used later is fetched into the second cache.
static inline void fetch(const uint8_t *line) { __builtin_prefetch(line, 0, 2); }

static inline Floats bf16_lanes(const uint8_t *line, int odd) {
    const Ints pairs = as_ints(load_bytes(line));
    return as_floats(odd ? pairs & splat(int32_t(0xFFFF0000)) : shift_left(pairs, 16));
}

// Element d of the keys of 16 tokens.
template <KvType Type> static inline Floats key(const uint8_t *tile, int d) {
    if constexpr (Type == KvType::F32)
        return load(reinterpret_cast<const float *>(tile) + d * kLanes);
    else
        return bf16_lanes(tile + d / 2 * 64, d & 1);
}

// Elements column … column + 15 of the value of a token; without its scale.
template <KvType Type> static inline Floats value(const uint8_t *tile, int width, int token, int column) {
    if constexpr (Type == KvType::F32)
        return load(reinterpret_cast<const float *>(tile) + token * width + column);
    else if constexpr (Type == KvType::BF16)
        return bf16_lanes(tile + (token / 2 * width + column) * 4, token & 1);
    else
        return to_floats(load_int8(tile + token * width + column));
}

// The same lines of another tile.
template <KvType Type, int Columns>
static inline void fetch_values(const uint8_t *later, int width, int token, int column) {
    UNROLL
    for (int c = 0; c < Columns; ++c)
        if constexpr (Type == KvType::F32)
            fetch(later + (token * width + column + c * kLanes) * 4);
        else if (Type == KvType::BF16 && token % 2 == 0)
            fetch(later + (token / 2 * width + column + c * kLanes) * 4);
    if constexpr (Type == KvType::INT8)
        fetch(later + token * width + column);
}

// Scores of 16 tokens for each row; `later` is fetched meanwhile. Elements of even and odd lines are summed apart where
// there are registers for it: the order is the same for any number of rows.
template <KvType Type, int Count>
static inline void score_tile(const uint8_t *tile, const uint8_t *later, int width, const Rows &rows,
                              Floats (&scores)[Count]) {
    constexpr int kSums = kWide ? 2 : 1;
    Floats sums[Count][kSums];
    UNROLL
    for (int r = 0; r < Count; ++r)
        for (int i = 0; i < kSums; ++i)
            sums[r][i] = splat(0.0f);
#if defined(__AVX512BF16__)
    if constexpr (Type == KvType::BF16) {
        for (int line = 0; line < width / 2; line += 2) {
            const Bytes even = load_bytes(tile + line * 64), odd = load_bytes(tile + line * 64 + 64);
            fetch(later + line * 64);
            fetch(later + line * 64 + 64);
            const uint32_t *q = rows.queries + line * Count;
            UNROLL
            for (int r = 0; r < Count; ++r) {
                sums[r][0] = dot_bf16(sums[r][0], even, q[r]);
                sums[r][1] = dot_bf16(sums[r][1], odd, q[Count + r]);
            }
        }
    } else
#endif
    {
        const float *q = reinterpret_cast<const float *>(rows.queries);
        for (int d = 0; d < width; d += 2, q += 2 * Count) {
            fetch(later + d / 2 * 64);
            if constexpr (Type == KvType::F32)
                fetch(later + (d + width) / 2 * 64);
            const Floats even = key<Type>(tile, d), odd = key<Type>(tile, d + 1);
            UNROLL
            for (int r = 0; r < Count; ++r) {
                sums[r][0] = fma(even, splat(q[r]), sums[r][0]);
                sums[r][kSums - 1] = fma(odd, splat(q[Count + r]), sums[r][kSums - 1]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < Count; ++r)
        scores[r] = kSums == 2 ? sums[r][0] + sums[r][kSums - 1] : sums[r][0];
}

template <int Count>
static inline void score_int8_tile(const uint8_t *tile, const uint8_t *later, int width, const Rows &rows,
                                   Floats (&scores)[Count]) {
    constexpr int kMost = 8; // lines that Dots can sum
    const int32_t *q = reinterpret_cast<const int32_t *>(rows.queries);
    Ints sums[Count];
    UNROLL
    for (int r = 0; r < Count; ++r)
        sums[r] = splat(-rows.offsets[r]);
    for (int first = 0; first < width / 4; first += kMost) {
        const int last = first + kMost < width / 4 ? first + kMost : width / 4;
        Dots<8> dots[Count];
        for (int line = first; line < last; ++line, q += Count) {
            fetch(later + line * 64);
            const Bytes keys = load_bytes(tile + line * 64);
            UNROLL
            for (int r = 0; r < Count; ++r)
                dots[r].add(keys, q[r]);
        }
        UNROLL
        for (int r = 0; r < Count; ++r)
            sums[r] = sums[r] + dots[r].sum();
    }
    fetch(later + width * kKvTile);
    const Floats scales = load(reinterpret_cast<const float *>(tile + width * kKvTile));
    UNROLL
    for (int r = 0; r < Count; ++r)
        scores[r] = to_floats(sums[r]) * (scales * splat(rows.scales[r]));
}

// sums[row][column …] += weights of the chunk's tokens · their values, for `Columns` lanes of 16.
template <KvType Type, int Count, int Columns>
static inline void add_values(const Chunk &chunk, int width, int column, float *sums, int64_t stride) {
    Floats o[Count][Columns];
    UNROLL
    for (int r = 0; r < Count; ++r)
        UNROLL
        for (int c = 0; c < Columns; ++c)
            o[r][c] = load(sums + r * stride + column + c * kLanes);
    for (int tile = 0; tile < chunk.tiles; ++tile) {
        const uint8_t *values = chunk.values[tile], *later = chunk.next_keys[tile];
#if defined(__AVX512BF16__)
        if constexpr (Type == KvType::BF16) {
            for (int token = 0; token < kKvTile; token += 2) {
                const uint8_t *line = values + (token / 2 * width + column) * 4;
                Bytes pairs[Columns];
                UNROLL
                for (int c = 0; c < Columns; ++c)
                    pairs[c] = load_bytes(line + c * 64);
                fetch_values<Type, Columns>(later, width, token, column);
                UNROLL
                for (int r = 0; r < Count; ++r) {
                    uint32_t pair;
                    std::memcpy(&pair, &chunk.weights_bf16[r][tile * kKvTile + token], sizeof pair);
                    UNROLL
                    for (int c = 0; c < Columns; ++c)
                        o[r][c] = dot_bf16(o[r][c], pairs[c], pair);
                }
            }
            continue;
        }
#endif
        if (Type == KvType::INT8 && column == 0)
            fetch(later + width * kKvTile); // the scales
        UNROLL
        for (int token = 0; token < kKvTile; ++token) {
            fetch_values<Type, Columns>(later, width, token, column);
            Floats lanes[Columns];
            UNROLL
            for (int c = 0; c < Columns; ++c)
                lanes[c] = value<Type>(values, width, token, column + c * kLanes);
            UNROLL
            for (int r = 0; r < Count; ++r) {
                const Floats weight = splat(chunk.weights[r][tile * kKvTile + token]);
                UNROLL
                for (int c = 0; c < Columns; ++c)
                    o[r][c] = fma(lanes[c], weight, o[r][c]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < Count; ++r)
        UNROLL
        for (int c = 0; c < Columns; ++c)
            store(sums + r * stride + column + c * kLanes, o[r][c]);
}

} // namespace appliance::APPLIANCE_ISA
