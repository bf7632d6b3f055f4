// Attention over a paged KV pool.
//
// A pool is [block][layer][2][kv head] planes; a plane holds the keys (or the values) of a block's tokens in one layer and
// head, in tiles of 16 tokens, one lane a token. Elements of a tile, d counting the head's elements padded with zeros to
// a multiple of 16:
//
//             keys                       values
//     F32     [d][16]                    [16][d]
//     BF16    [d / 2][16][2]             [8][d][2]: pairs of tokens
//     INT8    [d / 4][16][4] code + 128  [16][d] code;   each followed by 16 fp32 scales, one for a token
//
// A context is computed in segments between fixed token boundaries and merged in order, by whoever and in how many calls:
// a row's result depends on its own queries, keys and values alone.
#pragma once

#include <cstdint>

namespace appliance {

enum class KvType : int32_t { F32, BF16, INT8 };

constexpr int kKvTile = 16;       // tokens
constexpr int kKvSegment = 256;   // tokens; a multiple of every block size
constexpr int kQueryTokens = 32;  // most tokens of one Attention
constexpr int kMaxHeadDim = 512;

struct KvShape {
    KvType type;
    int32_t kv_heads, head_dim, block_size, layers; // block_size: 16, 32, 64, 128 or 256
};

inline int padded_head_dim(const KvShape &shape) { return (shape.head_dim + 15) / 16 * 16; }

inline int64_t tile_bytes(const KvShape &shape) {
    const int64_t d = padded_head_dim(shape);
    return shape.type == KvType::F32 ? d * 64 : shape.type == KvType::BF16 ? d * 32 : d * 16 + 64;
}
inline int64_t plane_bytes(const KvShape &shape) { return tile_bytes(shape) * (shape.block_size / kKvTile); }
inline int64_t kv_block_bytes(const KvShape &shape) { return plane_bytes(shape) * shape.kv_heads * 2 * shape.layers; }

// Up to kQueryTokens consecutive tokens of one sequence, their query heads that share a KV head.
struct Attention {
    KvShape shape;
    const uint8_t *layer; // the pool, from the first plane of the layer
    int32_t kv_head;
    int32_t query_heads; // that share the KV head
    const int32_t *table; // block of each block_size tokens of the sequence; below zero: unseen by any of these tokens
    int32_t first_position, tokens; // their keys are in the pool already
    int32_t window;   // a token sees itself and window - 1 before it; 0: all before it
    float scale, softcap; // softcap · tanh(score · scale / softcap), 0: none
    const float *sinks; // [query_heads] score of attending to nothing, or null
    const float *queries; // [tokens][query_stride], from the first of these heads, heads head_dim apart
    float *out;           // [tokens][out_stride], likewise
    int64_t query_stride, out_stride;
};

// The state of a row over a segment: weighted sum of values [padded_head_dim], highest score, total of the weights; the
// rest keeps rows on whole cache lines. A row that sees nothing of the segment has a total of 0.
inline int64_t partial_floats(const KvShape &shape) { return padded_head_dim(shape) + 16; }

// Segments of the context that these tokens see: first … last - 1, counted from token 0.
struct Segments {
    int32_t first, last;
};
Segments segments(const Attention &attention);

struct AttentionKernels {
    // Keys and values [head_dim] of a token for one KV head into the pool. Whoever begins a block clears it before: what
    // is not written yet is masked, but must be finite.
    void (*write)(const KvShape &shape, uint8_t *layer, int32_t kv_head, int32_t block, int32_t offset, const float *key,
                  const float *value);
    // All segments; writes `out`.
    void (*attend)(const Attention &attention);
    // One segment; partial: [tokens · query_heads][partial_floats].
    void (*attend_segment)(const Attention &attention, int32_t segment, float *partial);
    // The same bits as `attend`, from the partials of segments first … last - 1, one after another:
    // [segment][tokens · query_heads][partial_floats].
    void (*merge)(const Attention &attention, const float *partials);
};

} // namespace appliance
