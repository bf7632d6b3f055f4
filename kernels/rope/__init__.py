"""Rotary position embedding."""

from appliance.kernels.rope.reference import apply_rope, rope_table

__all__ = ["apply_rope", "rope_table"]
