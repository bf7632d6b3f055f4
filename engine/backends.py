"""Which backend executes a model's steps, and what keys and values it keeps: pure functions. Imports no torch."""

from __future__ import annotations

from enum import Enum

from appliance.engine.config import EngineConfig
from appliance.engine.errors import BackendError


class Backend(Enum):
    """Who executes the steps."""

    CPU = "cpu"
    """The native kernels."""
    REFERENCE = "reference"
    """Plain torch: the oracle, and what an install without a compiler has."""


# The types that each can keep, the one meant by "auto" first.
_KV_DTYPES = {
    Backend.CPU: ("bfloat16", "float32", "int8"),
    Backend.REFERENCE: ("float32", "bfloat16", "float16"),
}


def choose_backend(config: EngineConfig, library_built: bool) -> Backend:
    """The backend that `config.backend` means on an install with or without the native library.

    Raises:
        BackendError: the native kernels are asked for and were not built.
    """
    if config.backend == "reference":
        return Backend.REFERENCE
    if library_built:
        return Backend.CPU
    if config.backend == "cpu":
        raise BackendError(
            "backend is cpu, but the native kernels were not built, as there was no C++ compiler at install; "
            "reinstall with g++ or clang, or leave backend at auto to compute with torch, much slower"
        )
    return Backend.REFERENCE


def kv_dtype(config: EngineConfig, backend: Backend) -> str:
    """What keys and values are kept in: the name of a torch dtype, or "int8" (with a scale per token and head).

    Raises:
        BackendError: the backend cannot keep what `config.kv_cache_dtype` names.
    """
    kept = _KV_DTYPES[backend]
    if config.kv_cache_dtype == "auto":
        return kept[0]
    if config.kv_cache_dtype not in kept:
        raise BackendError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, but the {backend.value} backend keeps "
            f"{', '.join(kept[:-1])} or {kept[-1]}; choose one of these, or leave kv_cache_dtype at auto"
        )
    return config.kv_cache_dtype


def precision_note(config: EngineConfig, backend: Backend) -> str:
    """Why `config.activation_precision` has no effect, "" where it has one or nobody asked for anything."""
    if backend is Backend.REFERENCE and config.activation_precision == "bf16":
        return "activation_precision asks for bf16, but the reference backend rounds no activations: it takes float32"
    return ""
