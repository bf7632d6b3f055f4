"""Tiny models in an executor, and steps of several sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from appliance.engine.decoder import build_program
from appliance.engine.executors import CpuExecutor, Executor, TorchExecutor
from appliance.engine.executors.packing import load_matrices
from appliance.engine.families import read_spec
from appliance.engine.kv_groups import kv_groups
from appliance.engine.program import matrix_names
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVLayout
from appliance.kernels.linear.cpu import Precision
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.tensor import DenseTensor, Weight

BLOCK_SIZE = 16
_BLOCKS_A_SEQUENCE = 4
BACKENDS = ("reference", "cpu")
# Settings with which no backend rounds anything, so that their blocks take as much and their logits hardly differ.
EXACT = {"activation_precision": "float32", "kv_cache_dtype": "float32"}
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


class UnroundedWeights(ModelWeights):
    """Weights as codes and scales say, without the rounding of the tool that made them."""

    def read(self, name: str) -> Weight:
        weight = super().read(name)
        if isinstance(weight, DenseTensor):
            return weight
        return replace(weight, scheme=replace(weight.scheme, dtype="float32"))


def load_executor(
    path: Path,
    backend: str,
    spec: DecoderSpec | None = None,
    *,
    dense_bytes: int = 2**30,
    kv_dtype: str = "float32",
    precision: Precision = "float32",
    threads: int = 2,
    blocks: int = 16,
    max_model_len: int = 512,
    weights_type: type[ModelWeights] = ModelWeights,
) -> Executor:
    """An executor with `blocks` blocks in each KV group.

    Args:
        backend: "reference" or "cpu".
        spec: instead of the file's own.
        dense_bytes: of the reference.
        kv_dtype, precision, threads: of the native one; by default nothing is rounded.
    """
    spec = spec or read(path)
    layout = KVLayout(kv_groups(spec, getattr(torch, kv_dtype)), BLOCK_SIZE)
    executor: Executor
    with open_checkpoint(path) as checkpoint:
        weights, program = weights_type(checkpoint), build_program(spec)
        if backend == "reference":
            executor = TorchExecutor(program, spec, weights, layout, dense_bytes, _silent)
        elif backend == "gpu":
            # Of Triton, which an install without a GPU need not have.
            from appliance.engine.executors.gpu_executor import GpuExecutor

            cpu, dtype = torch.device("cpu"), torch.float16
            executor = GpuExecutor(program, spec, weights, layout, device=cpu, dtype=dtype, progress=_silent)
        else:
            matrices = load_matrices(path, weights, matrix_names(program), 2, _silent).by_name
            executor = CpuExecutor(
                program,
                spec,
                weights,
                matrices,
                layout,
                kv_dtype=kv_dtype,
                precision=precision,
                threads=threads,
                max_tokens=256,
            )
    executor.attach_pools([blocks] * len(layout.groups), max_model_len)
    return executor


def _silent(_done: int, _total: int) -> None:
    pass


class SmallModel:
    """A model with room for eight sequences of 64 tokens.

    Args:
        spec: instead of the file's own.
        options: of `load_executor`.
    """

    def __init__(
        self, path: Path, spec: DecoderSpec | None = None, backend: str = "reference", **options: Any
    ) -> None:
        spec = spec or read(path)
        self._groups = len(kv_groups(spec, torch.float32))
        self._executor = load_executor(
            path,
            backend,
            spec,
            blocks=8 * _BLOCKS_A_SEQUENCE,
            max_model_len=spec.context_len,
            **options,
        )

    def run(self, parts: list[Part]) -> list[torch.Tensor]:
        """Logits [tokens, vocab] of each part, all computed in one step."""
        rows = tuple(
            PlanRow(f"r{p.sequence}", p.ids, p.start, self._tables(p), True, SamplingParams(), (0,))
            for p in parts
        )
        self._executor.run(rows, [])
        lengths = [len(part.ids) for part in parts]
        return list(self._executor.logits(range(sum(lengths))).split(lengths))

    def _tables(self, part: Part) -> tuple[tuple[int, ...], ...]:
        """Blocks that are not in order, others in each group."""
        count = -(-(part.start + len(part.ids)) // BLOCK_SIZE)
        orders = ((2, 0, 3, 1), (1, 3, 0, 2))[: self._groups]
        first = part.sequence * _BLOCKS_A_SEQUENCE
        return tuple(tuple(first + place for place in order[:count]) for order in orders)
