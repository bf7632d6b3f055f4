"""These tests run Triton's kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton_interpreter  # noqa: F401


@pytest.fixture
def poisoned() -> Iterator[None]:
    """The same numbers in each test, and NaN in all memory that torch hands out empty."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
