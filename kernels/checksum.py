"""A checksum as fast as memory, against damage and not against malice; needs the native library. Imports no torch."""

from __future__ import annotations

import ctypes

from appliance.kernels.native import library


def checksum(address: int, num_bytes: int) -> int:
    """Of memory, 64 bits; other threads run meanwhile."""
    lib = library()
    assert lib is not None, "only asked where the native library was built"
    function = lib.appliance_checksum
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return int(function(address, num_bytes))
