"""`prepare`: an executor for a model, and how much memory its KV pools can have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from appliance.engine.backends import Backend, token_budget
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.errors import MemoryPlanError, UnsupportedModelError
from appliance.engine.executors import CpuExecutor, Executor, TorchExecutor
from appliance.engine.executors.packing import load_matrices
from appliance.engine.gpu_memory import device_memory, measure_peak
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

    config, spec, device, groups = parts.config, parts.spec, parts.device, len(parts.layout.groups)
    if spec.head_dim % 8:
        raise UnsupportedModelError(
            f"heads of {spec.head_dim} elements, the GPU's kernels take multiples of 8; set backend to cpu"
        )
    torch.set_num_threads(parts.threads)
    try:
        executor = GpuExecutor(
            build_program(spec),
            spec,
            parts.weights,
            parts.layout,
            device=device,
            dtype=parts.dtype,
            progress=parts.progress,
        )
        torch.set_num_threads(1)
        working_bytes = 0
        if device.type == "cuda":
            executor.attach_pools([1] * groups, parts.longest)
            runner = Runner(executor, spec.vocab_size)
            first_steps = partial(
                warm_up,
                runner,
                groups=groups,
                block_size=config.block_size,
                max_tokens=parts.token_budget,
                max_seqs=config.max_num_seqs,
                max_model_len=parts.longest,
            )
            working_bytes = measure_peak(device, first_steps)
    except torch.OutOfMemoryError as error:
        memory = device_memory(device)
        raise MemoryPlanError(
            f"{memory.describe()}; the model and its largest step need more: choose a smaller one, lower "
            f"max_num_batched_tokens (now {parts.token_budget}), or end what else uses the GPU"
        ) from error
    memory = device_memory(device)
    free_bytes = max(0, memory.free_bytes - working_bytes)
    return Prepared(executor, free_bytes, (memory.note(),), memory.kind, memory.describe())


_PREPARATIONS = {Backend.CPU: _cpu, Backend.GPU: _gpu, Backend.REFERENCE: _reference}


def prepare(parts: ModelParts) -> Prepared:
    """Read the weights into an executor of `parts.backend`.

    Raises:
        CheckpointError, OSError: the weights cannot be read as they should.
        UnsupportedModelError: the backend cannot execute the model.
        MemoryPlanError: not even the weights and a step fit.
    """
    return _PREPARATIONS[parts.backend](parts)
