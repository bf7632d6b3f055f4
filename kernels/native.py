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


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where the install has none.

    Raises:
        OSError: the library is there but cannot be loaded.
    """
    # In an editable install the sources and the built library live in different folders of one package.
    for folder in kernels.__path__:
        path = Path(folder) / "_native.so"
        if path.exists():
            lib = ctypes.CDLL(str(path))
            lib.appliance_isa.restype = ctypes.c_char_p
            lib.appliance_isa.argtypes = []
            lib.appliance_force_isa.argtypes = [ctypes.c_char_p]
            lib.appliance_attention_partials.restype = ctypes.c_int64
            return lib
    return None


def isa() -> str:
    """Name of the widest instruction set native kernels may use here, or "" without the library."""
    lib = library()
    return "" if lib is None else str(lib.appliance_isa().decode("ascii"))


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Kernels of another instruction set meanwhile, for tests.

    Raises:
        ValueError: this machine or this build hasn't it.
    """
    lib = library()
    if lib is None or not lib.appliance_force_isa(name.encode("ascii")):
        raise ValueError(f"instruction set {name!r} is not supported here")
    try:
        yield
    finally:
        lib.appliance_force_isa(b"")


def describe() -> str:
    """One line for people: what the native library offers on this machine, or why there is none."""
    name = isa()
    return f"native library: built, {name}" if name else NOT_BUILT
