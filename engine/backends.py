"""Which backend executes a model's steps, and in what it computes: pure functions. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from appliance.engine.config import EngineConfig
from appliance.engine.errors import BackendError


class Backend(Enum):
    """Who executes the steps."""

    CPU = "cpu"
    """The native kernels."""
    GPU = "gpu"
    """Triton's kernels, on an NVIDIA GPU or interpreted."""
    REFERENCE = "reference"
    """Plain torch: the oracle, and what an install without a compiler has."""


@dataclass(frozen=True, slots=True)
class GpuFault:
    """Why no GPU can be used: one line, what was found, what is needed and what to do.

    Attributes:
        present: whether the machine has an NVIDIA GPU.
    """

    line: str
    present: bool


NO_GPU = GpuFault("this machine has no NVIDIA GPU; leave backend and device at auto", present=False)

# What each computes in, and the types of keys and values that it can keep; the one meant by "auto" first.
_DTYPES = {
    Backend.CPU: ("float32",),
    Backend.GPU: ("bfloat16", "float16"),
    Backend.REFERENCE: ("float32",),
}
_KV_DTYPES = {
    Backend.CPU: ("bfloat16", "float32", "int8"),
    Backend.GPU: ("bfloat16", "float16", "int8"),
    Backend.REFERENCE: ("float32", "bfloat16", "float16"),
}

# Tokens of a step without a word from the user. A GPU has work for all its cores with many, a CPU with few.
_TOKEN_BUDGETS = {Backend.CPU: 128, Backend.GPU: 2048, Backend.REFERENCE: 128}


def token_budget(config: EngineConfig, backend: Backend) -> int:
    """Most tokens computed in a step: enough that every running sequence can have one."""
    return max(config.max_num_batched_tokens or _TOKEN_BUDGETS[backend], config.max_num_seqs)


def wants_gpu(config: EngineConfig) -> bool:
    """Whether a GPU is to be looked for."""
    return config.backend in ("auto", "gpu") and config.device != "cpu"


def choose_backend(config: EngineConfig, library_built: bool, gpu_fault: GpuFault | None = NO_GPU) -> Backend:
    """The backend that `config.backend` and `config.device` mean on this machine.

    Args:
        library_built: whether the install has the native library.
        gpu_fault: why no GPU can be used, None where one can; not asked unless `wants_gpu`.

    Raises:
        BackendError: what is asked for is not there, or contradicts itself.
    """
    asks_for_gpu = config.backend == "gpu" or config.device.startswith("cuda")
    if asks_for_gpu and not wants_gpu(config):
        raise BackendError(
            f"backend is {config.backend}, but device is {config.device}; leave one of them at auto"
        )
    if config.backend == "reference":
        return Backend.REFERENCE
    if wants_gpu(config) and gpu_fault is None:
        return Backend.GPU
    if asks_for_gpu and gpu_fault is not None:
        asked = "backend is gpu" if config.backend == "gpu" else f"device is {config.device}"
        raise BackendError(f"{asked}, but {gpu_fault.line}")
    if library_built:
        return Backend.CPU
    if config.backend == "cpu":
        raise BackendError(
            "backend is cpu, but the native kernels were not built, as there was no C++ compiler at install; "
            "reinstall with g++ or clang, or leave backend at auto to compute with torch, much slower"
        )
    return Backend.REFERENCE


def gpu_note(config: EngineConfig, backend: Backend, gpu_fault: GpuFault | None) -> str:
    """Why the machine's GPU is not used, "" where it is, where there is none and where nobody wants it."""
    if gpu_fault is None or not gpu_fault.present or not wants_gpu(config):
        return ""
    return f"{gpu_fault.line}; running on the {backend.value} backend"


def activation_dtype(
    config: EngineConfig, backend: Backend, interpreted: bool = False, checkpoint_dtype: str = ""
) -> str:
    """What a model is computed in: the name of a torch dtype.

    Args:
        interpreted: whether Triton's interpreter runs the kernels, which rounds bfloat16 wrongly.
        checkpoint_dtype: what the checkpoint says it was made in, "" where it does not; "auto" means that where the
            backend computes in it.

    Raises:
        BackendError: the backend does not compute in `config.dtype`.
    """
    offered = _right(_DTYPES[backend], interpreted)
    if config.dtype == "auto" and checkpoint_dtype in offered:
        return checkpoint_dtype
    return _choice("dtype", config.dtype, backend, "computes in", offered)


def kv_dtype(
    config: EngineConfig, backend: Backend, interpreted: bool = False, checkpoint_dtype: str = ""
) -> str:
    """What keys and values are kept in: the name of a torch dtype, or "int8" (with a scale per token and head).

    On a GPU "auto" is what the model is computed in.

    Args:
        interpreted, checkpoint_dtype: of `activation_dtype`.

    Raises:
        BackendError: the backend cannot keep what `config.kv_cache_dtype` names.
    """
    kept = _right(_KV_DTYPES[backend], interpreted)
    if backend is Backend.GPU and config.kv_cache_dtype == "auto":
        return activation_dtype(config, backend, interpreted, checkpoint_dtype)
    return _choice("kv_cache_dtype", config.kv_cache_dtype, backend, "keeps", kept)


def _right(dtypes: Sequence[str], interpreted: bool) -> list[str]:
    return [name for name in dtypes if not (interpreted and name == "bfloat16")]


def _choice(setting: str, asked: str, backend: Backend, verb: str, offered: Sequence[str]) -> str:
    if asked == "auto":
        return offered[0]
    if asked not in offered:
        *others, last = offered
        choose = "choose one of these, or " if others else ""
        raise BackendError(
            f"{setting} is {asked}, but the {backend.value} backend {verb} "
            f"{', '.join(others)}{' or ' if others else ''}{last}; {choose}leave {setting} at auto"
        )
    return asked


def precision_note(config: EngineConfig, backend: Backend) -> str:
    """Why `config.activation_precision` has no effect, "" where it has one or nobody asked for anything."""
    asked = config.activation_precision
    if backend is Backend.REFERENCE and asked == "bf16":
        return "activation_precision asks for bf16, but the reference backend rounds no activations: it takes float32"
    if backend is Backend.GPU and asked != "int8":
        return f"activation_precision asks for {asked}, but the gpu backend rounds activations to what dtype says"
    return ""
