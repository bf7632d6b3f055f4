"""What the engine tells about itself: scalars only, cheap enough to send several times a second."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Names ending in `_total` only ever grow while the worker lives; the rest are gauges.

    Attributes:
        blocks_total: of all KV groups together, as are those that follow.
        blocks_used: held by at least one running sequence.
        blocks_cached: held by none, but findable by the prefix cache until they are needed.
        blocks_free: neither.
        prefix_lookup_tokens_total: prompt tokens for which the prefix cache was asked.
        prefix_hit_tokens_total: of these, the ones it had.
        kv_block_bytes: size of one block over all layers of its group; the mean where the groups' differ.
        rss_bytes: resident memory of the worker process.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    kv_block_bytes: int = 0
    prefix_lookup_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    rss_bytes: int = 0
