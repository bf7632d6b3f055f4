"""`Runner`: runs a step plan on a loaded model. `load_model` makes one from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from appliance.engine.batch import Batch, build_batch
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.executors import TorchExecutor
from appliance.engine.families import read_spec
from appliance.engine.logprobs import score
from appliance.engine.machine import available_memory, usable_cpus
from appliance.engine.memory import GroupNeed, MemoryPlan, plan_memory
from appliance.engine.notes import load_notes
from appliance.engine.sampler import sample
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow, PositionLogprobs, RowResult, StepPlan, StepResult
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.quant.checkpoint import open_checkpoint

# The torch executor keeps the matrices of a model dequantised where they take no more than this, nor more than this
# share of the free memory: a small model runs many times faster so. A larger one costs what its codes cost.
_DENSE_BYTES = 2 * 2**30
_DENSE_SHARE = 0.5
_KV_DTYPES = {
    "auto": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Logits of a whole prompt would take gigabytes: they are computed and used up in portions of this size.
_LOGITS_BYTES = 64 * 2**20


class Runner:
    """Executes plans: copies blocks, builds the batch, runs the program, scores and samples."""

    def __init__(self, executor: TorchExecutor, block_size: int, vocab_size: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._rows_at_once = max(1, _LOGITS_BYTES // (4 * vocab_size))

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan."""
        self._executor.copy_blocks(plan.copies)
        if not plan.rows:
            return StepResult(())
        batch = build_batch(plan, self._block_size)
        hidden = self._executor.run(batch)
        results = [RowResult(failed=failed) for failed in self._failed(plan, batch, hidden)]
        sampled = [i for i, row in enumerate(plan.rows) if row.wants_logits and not results[i].failed]
        places = [batch.row_starts[index] + plan.rows[index].n_tokens - 1 for index in sampled]
        for index, logits in zip(sampled, self._logits(hidden, places, batch), strict=True):
            results[index] = sample(logits, plan.rows[index])
        for index, row in enumerate(plan.rows):
            if row.targets and not results[index].failed:
                first = batch.row_starts[index] + row.score_offset
                results[index] = self._scored(results[index], row, hidden, first, batch)
        return StepResult(tuple(results))

    def _failed(self, plan: StepPlan, batch: Batch, hidden: torch.Tensor) -> list[bool]:
        """For each row of the plan, whether any of its tokens has a hidden state that is not finite."""
        finite = hidden.isfinite().all(dim=-1).tolist()
        starts = zip(plan.rows, batch.row_starts, strict=True)
        return [not all(finite[start : start + row.n_tokens]) for row, start in starts]

    def _logits(self, hidden: torch.Tensor, places: Sequence[int], batch: Batch) -> Iterator[torch.Tensor]:
        """The logits [vocab] of each of the rows `places` of `hidden`, never more than `_LOGITS_BYTES` at once."""
        for start in range(0, len(places), self._rows_at_once):
            yield from self._executor.logits(hidden[list(places[start : start + self._rows_at_once])], batch)

    def _scored(
        self, result: RowResult, row: PlanRow, hidden: torch.Tensor, first: int, batch: Batch
    ) -> RowResult:
        """`result` with the log probabilities of the row's targets."""
        places = range(first, first + len(row.targets))
        scored: list[PositionLogprobs] = []
        failed = result.failed
        for target, logits in zip(row.targets, self._logits(hidden, places, batch), strict=True):
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


def kv_groups(spec: DecoderSpec, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    """Layers that see equally far share a group; those that see everything come first."""
    layers: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        layers.setdefault(layer.window, []).append(index)
    return tuple(
        KVGroup(tuple(indices), spec.num_kv_heads, spec.head_dim, dtype, window)
        for window, indices in sorted(layers.items())
    )


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Read a checkpoint, plan its KV memory and allocate it.

    Args:
        progress: told how far reading the weights has come.

    Raises:
        CheckpointError, OSError: the file cannot be read as it should.
        UnsupportedModelError: its architecture or a feature of it is not supported.
        MemoryPlanError: no useful KV pool fits.
    """
    torch.set_num_threads(config.num_threads or usable_cpus())
    with open_checkpoint(config.model_path) as checkpoint:
        weights = ModelWeights(checkpoint)
        spec = read_spec(checkpoint.architecture, checkpoint.metadata, weights.names)
        layout = KVLayout(kv_groups(spec, _KV_DTYPES[config.kv_cache_dtype]), config.block_size)
        dense_bytes = min(_DENSE_BYTES, int(available_memory() * _DENSE_SHARE))
        executor = TorchExecutor(build_program(spec), spec, weights, layout, dense_bytes, progress)
        eos_token_ids = frozenset(checkpoint.eos_token_ids)
        tensor_types = checkpoint.tensor_types()
        notes = checkpoint.notes
    block_bytes = [layout.block_bytes(group) for group in range(len(layout.groups))]
    windows = tuple(group.window for group in layout.groups)
    memory = plan_memory(
        free_bytes=available_memory(),
        groups=[GroupNeed(size, window) for size, window in zip(block_bytes, windows, strict=True)],
        block_size=config.block_size,
        chunk=config.token_budget,
        model_context_len=spec.longest_context(config.max_model_len),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        share=config.gpu_memory_utilization,
    )
    executor.attach_pools(memory.num_blocks, memory.max_model_len)
    pool_bytes = sum(n * size for n, size in zip(memory.num_blocks, block_bytes, strict=True))
    return LoadedModel(
        runner=Runner(executor, config.block_size, spec.vocab_size),
        spec=spec,
        memory=memory,
        windows=windows,
        kv_block_bytes=pool_bytes // sum(memory.num_blocks),
        weight_bytes=executor.weight_bytes,
        eos_token_ids=eos_token_ids,
        notes=notes + load_notes(config, memory.note, tensor_types),
    )
