"""Triton's interpreter runs these kernels on the CPU; it must be chosen before a kernel is imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
