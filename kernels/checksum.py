"""A checksum as fast as memory, against damage and not against malice; needs the native library. Imports no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from appliance.kernels.native import library


def checksum(address: int, num_bytes: int) -> int:
    """Of memory, 64 bits; other threads run meanwhile."""
    return _function()(address, num_bytes)


@cache
def _function() -> Callable[[int, int], int]:
    lib = library()
    assert lib is not None, "only asked where the native library was built"
    function: Callable[[int, int], int] = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64)(
        ("appliance_checksum", lib)
    )
    return function
