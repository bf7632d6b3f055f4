"""Memory of our own, by whole pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import torch

from appliance.kernels.native import library

_HUGE_PAGE = 2 << 20


def anonymous(num_bytes: int, *, huge_pages: bool = False) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], page-aligned. Pages take no memory before they are written.

    A forked child has its own from when it writes to them.

    Args:
        huge_pages: take those where the system has some; for what is written at once.
    """
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy main memory from one address to another, not overlapping, by the calling thread alone.

    Python runs on meanwhile, and what the caches hold stays there where the library is built.
    """
    _copy()(target, source, num_bytes)


@cache
def _copy() -> Callable[[int, int, int], object]:
    lib = library()
    if lib is None:
        return ctypes.memmove
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function: Callable[[int, int, int], object] = kind(("appliance_copy", lib))
    return function
