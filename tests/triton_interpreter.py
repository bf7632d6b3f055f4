"""Triton's interpreter runs its kernels on the CPU; it is chosen when a kernel is decorated, at the import."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor: Any, scope: Any) -> None:
    """Triton 3.6 holds a number as an array of one element, of which numpy 2.4 makes no integer any more."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    members = ((name, getattr(package, name)) for name in dir(package))
    return [(name, member) for name, member in members if tl.core.is_builtin(member)]


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As Triton's own, which looks for what to replace, and replaces it, anew in every function that a kernel calls."""
    for name, member in _builtins(package):
        if getattr(package, name) is not member:
            break
        interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtins
