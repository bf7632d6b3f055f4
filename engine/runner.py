"""`Runner`: runs a step plan on a loaded model. `load_model` makes one from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import torch

from appliance.engine.backends import Backend, choose_backend, kv_dtype, precision_note
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors import LOGITS_BYTES, CpuExecutor, Executor, TorchExecutor
from appliance.engine.executors.packing import load_matrices
from appliance.engine.families import read_spec
from appliance.engine.logprobs import score
from appliance.engine.machine import available_memory, usable_cpus
from appliance.engine.memory import GroupNeed, MemoryPlan, plan_memory
from appliance.engine.notes import load_notes
from appliance.engine.program import matrix_names
from appliance.engine.sampler import is_greedy, sample
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow, PositionLogprobs, RowResult, StepPlan, StepResult
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


class Runner:
    """Executes plans: copies blocks, runs the program, scores and samples."""

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        self._executor = executor
        self._rows_at_once = max(1, LOGITS_BYTES // (4 * vocab_size))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan."""
        self._executor.copy_blocks(plan.copies)
        if not plan.rows:
            return StepResult(())
        starts = list(accumulate((row.n_tokens for row in plan.rows), initial=0))
        last = [stop - 1 for stop in starts[1:]]
        sampled = [index for index, row in enumerate(plan.rows) if row.wants_logits]
        greedy = [index for index in sampled if is_greedy(plan.rows[index])]
        drawn = [index for index in sampled if not is_greedy(plan.rows[index])]
        output = self._executor.run(plan.rows, [last[index] for index in greedy])
        results = [RowResult(failed=not all(output.finite[a:b])) for a, b in pairwise(starts)]
        for index, token_id in zip(greedy, output.largest, strict=True):
            ids = (max(token_id, 0),) * len(plan.rows[index].seeds)
            results[index] = RowResult(ids, failed=results[index].failed or token_id < 0)
        drawn = [index for index in drawn if not results[index].failed]
        for index, logits in zip(drawn, self._logits([last[index] for index in drawn]), strict=True):
            results[index] = sample(logits, plan.rows[index])
        for index, row in enumerate(plan.rows):
            if row.targets and not results[index].failed:
                results[index] = self._scored(results[index], row, starts[index] + row.score_offset)
        return StepResult(tuple(results))

    def _logits(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """The logits [vocab] of each of these tokens of the step, never more than `LOGITS_BYTES` at once."""
        for start in range(0, len(tokens), self._rows_at_once):
            yield from self._executor.logits(tokens[start : start + self._rows_at_once])

    def _scored(self, result: RowResult, row: PlanRow, first: int) -> RowResult:
        """`result` with the log probabilities of the row's targets, whose logits begin with those of token `first`."""
        tokens = range(first, first + len(row.targets))
        scored: list[PositionLogprobs] = []
        failed = result.failed
        for target, logits in zip(row.targets, self._logits(tokens), strict=True):
            failed = failed or not bool(logits.isfinite().all())
            scored += score(logits.unsqueeze(0), [target], row.sampling.prompt_logprobs or 0)
        return replace(result, prompt_logprobs=tuple(scored), failed=failed)


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
