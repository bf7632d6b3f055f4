"""`Runner`: runs a step plan on a loaded model. `load_model` makes one from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from appliance.engine.batch import build_batch
from appliance.engine.config import EngineConfig
from appliance.engine.decoder import build_program
from appliance.engine.executors import TorchExecutor
from appliance.engine.families import read_spec
from appliance.engine.memory import MemoryPlan, plan_memory
from appliance.engine.sampler import sample
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import StepPlan, StepResult
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.quant.gguf.checkpoint import GGUFCheckpoint

# Of the free memory, what the torch executor may fill with dequantised matrices.
_DENSE_SHARE = 0.6


class Runner:
    """Executes plans: builds the batch, runs the program, samples."""

    def __init__(self, executor: TorchExecutor, block_size: int) -> None:
        self._executor = executor
        self._block_size = block_size

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan. This memory has one tier, so the plan has no copies."""
        assert not plan.copies
        if not plan.rows:
            return StepResult(())
        logits = self._executor.run(build_batch(plan, self._block_size))
        wanted = [index for index, row in enumerate(plan.rows) if row.wants_logits]
        ids, failed = sample(logits, [plan.rows[index] for index in wanted])
        token_ids: list[tuple[int, ...]] = [()] * len(plan.rows)
        for index, token_id in zip(wanted, ids, strict=True):
            token_ids[index] = (token_id,)
        return StepResult(tuple(token_ids), frozenset(wanted[index] for index in failed))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the memory it was given."""

    runner: Runner
    spec: DecoderSpec
    memory: MemoryPlan
    kv_block_bytes: int
    weight_bytes: int
    eos_token_ids: frozenset[int]


def load_model(config: EngineConfig) -> LoadedModel:
    """Read a checkpoint, plan its KV memory and allocate it.

    Raises:
        CheckpointError, OSError: the file cannot be read as it should.
        UnsupportedModelError: its architecture or a feature of it is not supported.
        MemoryPlanError: no useful KV pool fits.
    """
    torch.set_num_threads(config.num_threads or len(psutil.Process().cpu_affinity() or [0]))
    with GGUFCheckpoint(config.model_path) as checkpoint:
        weights = ModelWeights(checkpoint)
        spec = read_spec(checkpoint.metadata, weights.names)
        group = KVGroup(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, torch.float32)
        layout = KVLayout((group,), config.block_size)
        dense_bytes = int(psutil.virtual_memory().available * _DENSE_SHARE)
        executor = TorchExecutor(build_program(spec), spec, weights, layout, dense_bytes)
        eos_token_ids = frozenset(checkpoint.eos_token_ids)
    memory = plan_memory(
        free_bytes=psutil.virtual_memory().available,
        block_bytes=layout.block_bytes(0),
        block_size=config.block_size,
        model_context_len=spec.context_len,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
    )
    executor.attach_pools(memory.num_blocks)
    return LoadedModel(
        runner=Runner(executor, config.block_size),
        spec=spec,
        memory=memory,
        kv_block_bytes=layout.block_bytes(0),
        weight_bytes=executor.weight_bytes,
        eos_token_ids=eos_token_ids,
    )
