"""Attention over keys and values that lie in blocks."""

from appliance.kernels.paged_attention.reference import QUERY_TILE, kv_tiles, kv_write, paged_attention

__all__ = ["QUERY_TILE", "kv_tiles", "kv_write", "paged_attention"]
