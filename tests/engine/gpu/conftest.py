"""These tests run Triton's kernels on the CPU."""

import triton_interpreter  # noqa: F401
