"""`load_model`: a model ready to run, made from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from appliance.engine.backends import Backend, choose_backend, kv_dtype, precision_note
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors import CpuExecutor, Executor, TorchExecutor
from appliance.engine.executors.packing import load_matrices
from appliance.engine.families import read_spec
from appliance.engine.machine import available_memory, usable_cpus
from appliance.engine.memory import GroupNeed, MemoryPlan, plan_memory
from appliance.engine.notes import load_notes
from appliance.engine.program import matrix_names
from appliance.engine.runner import Runner
from appliance.engine.spec import DecoderSpec
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels import native
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.kernels.linear.cpu import Precision
from appliance.kernels.paged_attention.cpu import MAX_HEAD_DIM
from appliance.quant.checkpoint import open_checkpoint

# The torch executor keeps the matrices of a model dequantised where they take no more than this, nor more than this
# share of the free memory: a small model runs many times faster so. A larger one costs what its codes cost.
_DENSE_BYTES = 2 * 2**30
_DENSE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, the memory it was given, and what is not as it was asked for.

    Attributes:
        windows: of each KV group.
        kv_block_bytes: size of a block, the mean where the groups' differ.
    """

    runner: Runner
    spec: DecoderSpec
    memory: MemoryPlan
    windows: tuple[int, ...]
    kv_block_bytes: int
    weight_bytes: int
    eos_token_ids: frozenset[int]
    notes: tuple[str, ...]
    backend: Backend


def kv_groups(spec: DecoderSpec, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """Layers that see equally far share a group; those that see everything come first."""
    layers: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        layers.setdefault(layer.window, []).append(index)
    return tuple(
        KVGroup(tuple(indices), spec.num_kv_heads, spec.head_dim, dtype, window)
        for window, indices in sorted(layers.items())
    )


def _executor(
    config: EngineConfig,
    backend: Backend,
    kv: str,
    spec: DecoderSpec,
    weights: ModelWeights,
    layout: KVLayout,
    progress: Progress,
) -> tuple[Executor, str, int]:
    """The executor, what is to be said of it ("" for nothing), and bytes of weights that count as free memory."""
    program, threads = build_program(spec), config.num_threads or usable_cpus()
    if backend is Backend.REFERENCE:
        torch.set_num_threads(threads)
        dense_bytes = min(_DENSE_BYTES, int(available_memory() * _DENSE_SHARE))
        return TorchExecutor(program, spec, weights, layout, dense_bytes, progress), "", 0
    # What torch still does between steps is too small to be shared, and its threads would be in the way of ours.
    torch.set_num_threads(1)
    loaded = load_matrices(Path(config.model_path), weights, matrix_names(program), threads, progress)
    executor = CpuExecutor(
        program,
        spec,
        weights,
        loaded.by_name,
        layout,
        kv_dtype=kv,
        precision=cast(Precision, config.activation_precision),
        threads=threads,
        max_tokens=config.token_budget,
    )
    return executor, loaded.note, loaded.mapped_bytes


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Read a checkpoint, plan its KV memory and allocate it.

    Args:
        progress: told how far reading the weights has come.

    Raises:
        CheckpointError, OSError: the file cannot be read as it should.
        UnsupportedModelError: its architecture or a feature of it is not supported.
        MemoryPlanError: no useful KV pool fits.
    """
    backend = choose_backend(config, native.library() is not None)
    kv = kv_dtype(config, backend)
    with open_checkpoint(config.model_path) as checkpoint:
        weights = ModelWeights(checkpoint)
        spec = read_spec(checkpoint.architecture, checkpoint.metadata, weights.names)
        if backend is Backend.CPU and spec.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"heads of {spec.head_dim} elements, the native kernels take up to {MAX_HEAD_DIM}; "
                "set backend to reference"
            )
        layout = KVLayout(kv_groups(spec, getattr(torch, kv)), config.block_size)
        executor, executor_note, mapped_bytes = _executor(
            config, backend, kv, spec, weights, layout, progress
        )
        eos_token_ids = frozenset(checkpoint.eos_token_ids)
        tensor_types = checkpoint.tensor_types()
        notes = checkpoint.notes
    block_bytes = [executor.block_bytes(group) for group in range(len(layout.groups))]
    windows = tuple(group.window for group in layout.groups)
    context_len = spec.longest_context(config.max_model_len)
    taken = mapped_bytes + executor.working_bytes(min(context_len, config.max_model_len or context_len))
    memory = plan_memory(
        free_bytes=max(0, available_memory() - taken),
        groups=[GroupNeed(size, window) for size, window in zip(block_bytes, windows, strict=True)],
        block_size=config.block_size,
        chunk=config.token_budget,
        model_context_len=context_len,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        share=config.gpu_memory_utilization,
    )
    executor.attach_pools(memory.num_blocks, memory.max_model_len)
    pool_bytes = sum(n * size for n, size in zip(memory.num_blocks, block_bytes, strict=True))
    own_notes = (memory.note, precision_note(config, backend), executor_note)
    return LoadedModel(
        runner=Runner(executor, spec.vocab_size),
        backend=backend,
        spec=spec,
        memory=memory,
        windows=windows,
        kv_block_bytes=pool_bytes // sum(memory.num_blocks),
        weight_bytes=executor.weight_bytes,
        eos_token_ids=eos_token_ids,
        notes=notes + load_notes(config, own_notes, tensor_types),
    )
