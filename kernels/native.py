"""The native library, where it was built. Imports no torch, so the daemon and `appliance version` may ask.

The library is optional: an install without a C++ compiler leaves it out, and steps then run on torch alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from appliance import kernels

NOT_BUILT = "native library: not built (no C++ compiler at install); reinstall with g++ or clang to get it"


# Raised with every change of what the library exports (kernels/runtime/api.cpp).
_ABI = 3


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where the install has none.

    Raises:
        OSError: the library is there but cannot be loaded, or belongs to another version.
    """
    # In an editable install the sources and the built library live in different folders of one package.
    for folder in kernels.__path__:
        path = Path(folder) / "_native.so"
        if path.exists():
            lib = ctypes.CDLL(str(path))
            if not hasattr(lib, "appliance_abi") or lib.appliance_abi() != _ABI:
                raise OSError(f"{path} was built from other sources than this package; reinstall it")
            lib.appliance_isa.restype = ctypes.c_char_p
            lib.appliance_isa.argtypes = []
            lib.appliance_force_isa.restype = ctypes.c_int
            lib.appliance_force_isa.argtypes = [ctypes.c_char_p]
            lib.appliance_block_bytes.restype = ctypes.c_int64
            lib.appliance_attention_partials.restype = ctypes.c_int64
            return lib
    return None


def isa() -> str:
    """Name of the widest instruction set native kernels may use here, or "" without the library."""
    lib = library()
    return "" if lib is None else str(lib.appliance_isa().decode("ascii"))


@contextmanager
def forced_isa(name: str) -> Iterator[bool]:
    """Native kernels of another instruction set, in the whole process, for tests; False where it isn't there."""
    lib = library()
    there = lib is not None and bool(lib.appliance_force_isa(name.encode("ascii")))
    try:
        yield there
    finally:
        if lib is not None:
            lib.appliance_force_isa(b"")


def describe() -> str:
    """One line for people: what the native library offers on this machine, or why there is none."""
    name = isa()
    return f"native library: built, {name}" if name else NOT_BUILT
