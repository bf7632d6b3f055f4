"""Packed codes into another order."""

from appliance.kernels.repack.op import reorder_codes, transpose_nibbles, transpose_words

__all__ = ["reorder_codes", "transpose_nibbles", "transpose_words"]
