"""Tiny models in the torch executor, and steps of several sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from appliance.engine.batch import build_batch
from appliance.engine.decoder import build_program
from appliance.engine.executors import TorchExecutor
from appliance.engine.families import read_spec
from appliance.engine.runner import kv_groups
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow, StepPlan
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVLayout
from appliance.quant.checkpoint import open_checkpoint

BLOCK_SIZE = 16
_BLOCKS_A_SEQUENCE = 4
# With a golden model each, `arch_<family>`; those with experts are tested apart.
DENSE_FAMILIES = (
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)


@dataclass(frozen=True)
class Part:
    """Tokens start … start + len(ids) - 1 of a sequence, whose number says where its keys and values are."""

    sequence: int
    ids: tuple[int, ...]
    start: int = 0


def read(path: Path) -> DecoderSpec:
    with open_checkpoint(path) as checkpoint:
        return read_spec(checkpoint.architecture, checkpoint.metadata, frozenset(checkpoint.names()))


class SmallModel:
    """A model with room for eight sequences of 64 tokens.

    Args:
        spec: instead of the file's own.
    """

    def __init__(self, path: Path, spec: DecoderSpec | None = None) -> None:
        spec = spec or read(path)
        layout = KVLayout(kv_groups(spec, torch.float32), BLOCK_SIZE)
        with open_checkpoint(path) as checkpoint:
            weights = ModelWeights(checkpoint)
            self._executor = TorchExecutor(
                build_program(spec), spec, weights, layout, 2**30, lambda _done, _total: None
            )
        self._groups = len(layout.groups)
        self._executor.attach_pools([8 * _BLOCKS_A_SEQUENCE] * self._groups, spec.context_len)

    def run(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits [tokens, vocab] of each part, all computed in one step."""
        rows = tuple(
            PlanRow(f"r{p.sequence}", p.ids, p.start, self._tables(p), True, SamplingParams(), (0,))
            for p in parts
        )
        batch = build_batch(StepPlan(1, rows), BLOCK_SIZE)
        logits = self._executor.logits(self._executor.run(batch), batch)
        return list(logits.split([len(part.ids) for part in parts]))

    def _tables(self, part: Part) -> tuple[tuple[int, ...], ...]:
        """Blocks that are not in order, others in each group."""
        count = -(-(part.start + len(part.ids)) // BLOCK_SIZE)
        orders = ((2, 0, 3, 1), (1, 3, 0, 2))[: self._groups]
        first = part.sequence * _BLOCKS_A_SEQUENCE
        return tuple(tuple(first + place for place in order[:count]) for order in orders)
