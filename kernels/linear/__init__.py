"""Product of rows with a weight matrix."""

from appliance.kernels.linear.cpu import MatrixLayout, PackedMatrix, multiply, read_rows
from appliance.kernels.linear.reference import linear, row_tiles

__all__ = ["MatrixLayout", "PackedMatrix", "linear", "multiply", "read_rows", "row_tiles"]
