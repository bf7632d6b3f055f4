"""Triton's interpreter runs these kernels on the CPU. It is chosen when a kernel is decorated, so before any is imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
