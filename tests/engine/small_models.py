"""Loads tiny models into the torch executor, and runs steps of several sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from appliance.engine.batch import build_batch
from appliance.engine.decoder import build_program
from appliance.engine.executors import TorchExecutor
from appliance.engine.families import read_spec
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow, StepPlan
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVGroup, KVLayout
from appliance.quant.checkpoint import open_checkpoint

BLOCK_SIZE = 16
_BLOCKS_A_SEQUENCE = 4


@dataclass(frozen=True)
class Part:
    """Tokens start … start + len(ids) - 1 of a sequence, whose number says where its keys and values are."""

    sequence: int
    ids: tuple[int, ...]
    start: int = 0


def read(path: Path) -> DecoderSpec:
    with open_checkpoint(path) as checkpoint:
        return read_spec(checkpoint.architecture, checkpoint.metadata, frozenset(checkpoint.names()))


def load(path: Path, spec: DecoderSpec | None = None) -> TorchExecutor:
    """With room for eight sequences of 64 tokens; by another spec than the file's, where one is given."""
    spec = spec or read(path)
    with open_checkpoint(path) as checkpoint:
        weights = ModelWeights(checkpoint)
        group = KVGroup(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, torch.float32)
        layout = KVLayout((group,), BLOCK_SIZE)
        executor = TorchExecutor(
            build_program(spec), spec, weights, layout, 2**30, lambda _done, _total: None
        )
    executor.attach_pools(8 * _BLOCKS_A_SEQUENCE, spec.context_len)
    return executor


def run(executor: TorchExecutor, parts: list[Part]) -> list[torch.Tensor]:
    """Logits [tokens, vocab] of each part, all computed in one step."""
    rows = tuple(
        PlanRow(f"r{part.sequence}", part.ids, part.start, (_table(part),), True, SamplingParams(), (0,))
        for part in parts
    )
    batch = build_batch(StepPlan(1, rows), BLOCK_SIZE)
    return list(executor.logits(executor.run(batch), batch).split([len(part.ids) for part in parts]))


def _table(part: Part) -> tuple[int, ...]:
    """Blocks that are not in order."""
    blocks = -(-(part.start + len(part.ids)) // BLOCK_SIZE)
    first = part.sequence * _BLOCKS_A_SEQUENCE
    return tuple(first + order for order in (2, 0, 3, 1)[:blocks])
