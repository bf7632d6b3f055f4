"""Triton's interpreter runs these kernels on the CPU; it is chosen when a kernel is decorated, at the import."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 holds a number as an array of one element, of which numpy 2.4 makes no integer any more."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch
