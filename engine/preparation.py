"""`prepare`: an executor for a model, and how much memory its KV pools can have."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import platformdirs
import torch

from appliance.engine.backends import Backend, token_budget
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.errors import MemoryPlanError, UnsupportedModelError
from appliance.engine.executors import CpuExecutor, Executor, TorchExecutor
from appliance.engine.executors.packing import load_matrices
from appliance.engine.gpu.memory import device_memory, measure_peak
from appliance.engine.machine import available_memory, usable_cpus
from appliance.engine.memory import MAIN_MEMORY, MemoryKind
from appliance.engine.program import matrix_names
from appliance.engine.runner import Runner
from appliance.engine.spec import DecoderSpec
from appliance.engine.warm_up import warm_up
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.kv_layout import KVLayout
from appliance.kernels.linear.cpu import Precision
from appliance.kernels.paged_attention.cpu import MAX_HEAD_DIM

log = logging.getLogger("appliance.engine")
# The torch executor keeps the matrices of a model dequantised where they take no more than this, nor more than this
# share of the free memory: a small model runs many times faster so. A larger one costs what its codes cost.
_DENSE_BYTES = 2 * 2**30
_DENSE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Prepared:
    """An executor without pools, and the memory that they can have.

    Attributes:
        free_bytes: that nothing else needs.
        notes: what is to be said, "" for nothing.
        situation: of the memory, for errors.
    """

    executor: Executor
    free_bytes: int
    notes: tuple[str, ...] = ()
    kind: MemoryKind = MAIN_MEMORY
    situation: str = ""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What executors are made of.

    Attributes:
        device, dtype: that the GPU backend computes on and in.
        layout: of the KV memory; the types of its groups are those that are kept.
    """

    config: EngineConfig
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    spec: DecoderSpec
    weights: ModelWeights
    layout: KVLayout
    progress: Progress

    @property
    def longest(self) -> int:
        """The longest sequence that may come to be served, in tokens."""
        context_len = self.spec.longest_context(self.config.max_model_len)
        return min(context_len, self.config.max_model_len or context_len)

    @property
    def token_budget(self) -> int:
        return token_budget(self.config, self.backend)

    @property
    def threads(self) -> int:
        return self.config.num_threads or usable_cpus()


def _reference(parts: ModelParts) -> Prepared:
    torch.set_num_threads(parts.threads)
    dense_bytes = min(_DENSE_BYTES, int(available_memory() * _DENSE_SHARE))
    program = build_program(parts.spec)
    executor = TorchExecutor(program, parts.spec, parts.weights, parts.layout, dense_bytes, parts.progress)
    return Prepared(executor, available_memory())


def _cpu(parts: ModelParts) -> Prepared:
    config, spec = parts.config, parts.spec
    if spec.head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"heads of {spec.head_dim} elements, the native kernels take up to {MAX_HEAD_DIM}; "
            "set backend to reference"
        )
    # What torch still does between steps is too small to be shared, and its threads would be in the way of ours.
    torch.set_num_threads(1)
    program = build_program(spec)
    loaded = load_matrices(
        Path(config.model_path), parts.weights, matrix_names(program), parts.threads, parts.progress
    )
    executor = CpuExecutor(
        program,
        spec,
        parts.weights,
        loaded.by_name,
        parts.layout,
        kv_dtype=str(parts.layout.groups[0].dtype).removeprefix("torch."),
        precision=cast(Precision, config.activation_precision),
        threads=parts.threads,
        max_tokens=parts.token_budget,
    )
    taken = loaded.mapped_bytes + executor.working_bytes(parts.longest)
    return Prepared(executor, max(0, available_memory() - taken), (loaded.note,))


def _gpu(parts: ModelParts) -> Prepared:
    # Of Triton, which only this backend needs.
    from appliance.engine.executors.gpu_executor import GpuExecutor
    from appliance.kernels.linear.gpu_tuning import ROWS, Tuning

    spec, device = parts.spec, parts.device
    if spec.head_dim % 8:
        raise UnsupportedModelError(
            f"heads of {spec.head_dim} elements, the GPU's kernels take multiples of 8; set backend to cpu"
        )
    torch.set_num_threads(parts.threads)
    folder = Path(platformdirs.user_cache_dir("appliance")) / "tiles"
    tuning = Tuning(folder, device, parts.dtype)
    try:
        executor = GpuExecutor(
            build_program(spec),
            spec,
            parts.weights,
            parts.layout,
            device=device,
            dtype=parts.dtype,
            progress=parts.progress,
            tile_for=tuning.tile_for,
        )
        torch.set_num_threads(1)
        tuning.tune(
            executor.packed_matrices, ROWS[: bisect_left(ROWS, parts.token_budget) + 1], progress=_tell
        )
        working_bytes = _first_steps(parts, executor)
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"{device_memory(device).describe()}; the model and its largest step need more: choose a smaller one, "
            f"lower max_num_batched_tokens (now {parts.token_budget}), max_model_len ({parts.longest}) or max_num_seqs "
            f"({parts.config.max_num_seqs}), or end what else uses the GPU"
        ) from error
    memory = device_memory(device)
    free_bytes = max(0, memory.free_bytes - working_bytes)
    return Prepared(executor, free_bytes, (memory.note(), tuning.note), memory.kind, memory.describe())


def _tell(done: int, total: int) -> None:
    log.info("measured the fastest tiles of %d of %d products on this GPU, which are kept", done, total)


def _first_steps(parts: ModelParts, executor: Executor) -> int:
    """Bytes that the largest steps take beside weights and pools; 0 under the interpreter, which would take hours."""
    if parts.device.type != "cuda":
        return 0
    log.info("running the first steps; where kernels are to be compiled, this takes a minute or two")
    groups = len(parts.layout.groups)
    executor.attach_pools([1] * groups, parts.longest)
    steps = partial(
        warm_up,
        Runner(executor, parts.spec.vocab_size),
        groups=groups,
        block_size=parts.layout.block_size,
        max_tokens=parts.token_budget,
        max_seqs=parts.config.max_num_seqs,
        max_model_len=parts.longest,
    )
    return measure_peak(parts.device, steps)


_PREPARATIONS = {Backend.CPU: _cpu, Backend.GPU: _gpu, Backend.REFERENCE: _reference}


def prepare(parts: ModelParts) -> Prepared:
    """Read the weights into an executor of `parts.backend`.

    Raises:
        CheckpointError, OSError: the weights cannot be read as they should.
        UnsupportedModelError: the backend cannot execute the model.
        MemoryPlanError: not even the weights and a step fit.
    """
    return _PREPARATIONS[parts.backend](parts)
