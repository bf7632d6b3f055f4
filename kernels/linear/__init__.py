"""Product of rows with a weight matrix."""

from appliance.kernels.linear.reference import linear, row_tiles

__all__ = ["linear", "row_tiles"]
