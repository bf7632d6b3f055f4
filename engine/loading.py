"""`load_model`: a model ready to run, made from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from appliance.engine.backends import (
    Backend,
    GpuFault,
    activation_dtype,
    choose_backend,
    gpu_note,
    kv_dtype,
    precision_note,
)
from appliance.engine.config import EngineConfig
from appliance.engine.errors import MemoryPlanError
from appliance.engine.families import read_spec
from appliance.engine.gpu.check import find_gpu, gpu_name
from appliance.engine.kv_groups import kv_groups
from appliance.engine.memory import GroupNeed, MemoryPlan, plan_memory
from appliance.engine.notes import load_notes
from appliance.engine.preparation import ModelParts, Prepared, prepare
from appliance.engine.runner import Runner
from appliance.engine.spec import DecoderSpec
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels import native
from appliance.kernels.kv_layout import KVLayout
from appliance.quant.checkpoint import open_checkpoint


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, the memory it was given, and what is not as it was asked for.

    Attributes:
        windows: of each KV group.
        kv_block_bytes: size of a block, the mean where the groups' differ.
        gpu: name of the one that executes steps, "" where none does.
        token_budget: most tokens of a step.
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
    gpu: str
    token_budget: int


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Read a checkpoint, plan its KV memory and allocate it.

    Args:
        progress: told how far reading the weights has come.

    Raises:
        CheckpointError, OSError: the file cannot be read as it should.
        UnsupportedModelError: its architecture or a feature of it is not supported.
        BackendError: what is asked to execute it is not there.
        MemoryPlanError: no useful KV pool fits.
    """
    gpu = find_gpu(config)
    device, fault = (torch.device("cpu"), gpu) if isinstance(gpu, GpuFault) else (gpu, None)
    backend = choose_backend(config, native.library() is not None, fault)
    interpreted = fault is None and device.type == "cpu"
    with open_checkpoint(config.model_path) as checkpoint:
        made_in = str(checkpoint.metadata.get("dtype") or checkpoint.metadata.get("torch_dtype") or "")
        dtype, kv = (choose(config, backend, interpreted, made_in) for choose in (activation_dtype, kv_dtype))
        weights = ModelWeights(checkpoint)
        spec = read_spec(checkpoint.architecture, checkpoint.metadata, weights.names)
        layout = KVLayout(kv_groups(spec, getattr(torch, kv)), config.block_size)
        parts = ModelParts(config, backend, device, getattr(torch, dtype), spec, weights, layout, progress)
        prepared = prepare(parts)
        eos_token_ids = frozenset(checkpoint.eos_token_ids)
        tensor_types = checkpoint.tensor_types()
        notes = checkpoint.notes
    executor = prepared.executor
    block_bytes = [executor.block_bytes(group) for group in range(len(layout.groups))]
    memory = _plan(parts, prepared, block_bytes)
    try:
        executor.attach_pools(memory.num_blocks, memory.max_model_len)
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"the GPU's memory that was free for KV blocks was taken meanwhile; {error}"
        ) from error
    pool_bytes = sum(n * size for n, size in zip(memory.num_blocks, block_bytes, strict=True))
    own_notes = (memory.note, gpu_note(config, backend, fault), precision_note(config, backend))
    return LoadedModel(
        runner=Runner(executor, spec.vocab_size),
        backend=backend,
        gpu=gpu_name(device) if backend is Backend.GPU else "",
        token_budget=parts.token_budget,
        spec=spec,
        memory=memory,
        windows=tuple(group.window for group in layout.groups),
        kv_block_bytes=pool_bytes // sum(memory.num_blocks),
        weight_bytes=executor.weight_bytes,
        eos_token_ids=eos_token_ids,
        notes=notes + load_notes(config, (*own_notes, *prepared.notes), tensor_types),
    )


def _plan(parts: ModelParts, prepared: Prepared, block_bytes: Sequence[int]) -> MemoryPlan:
    config, groups = parts.config, parts.layout.groups
    return plan_memory(
        free_bytes=prepared.free_bytes,
        groups=[GroupNeed(size, group.window) for size, group in zip(block_bytes, groups, strict=True)],
        block_size=config.block_size,
        chunk=parts.token_budget,
        model_context_len=parts.spec.longest_context(config.max_model_len),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        share=config.gpu_memory_utilization,
        kind=prepared.kind,
        situation=prepared.situation,
    )
