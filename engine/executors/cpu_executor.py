"""The executor of the native library: a step is one call."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from appliance.engine import program as ops
from appliance.engine.executors.base import StepOutput
from appliance.engine.executors.lowering import Parts, lower
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import BlockCopy, PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVLayout
from appliance.kernels.linear.cpu import PackedMatrix, Precision
from appliance.kernels.paged_attention.cpu import KvShape, KvType
from appliance.kernels.rope import rope_table
from appliance.kernels.runtime.model import NativeModel


class CpuExecutor:
    """Runs a step program by native kernels over packed weights.

    Args:
        weights: norms, biases and sinks are read of it while loading.
        matrices: of `matrix_names(program)`, as they are multiplied.
        kv_dtype: "float32", "bfloat16" or "int8".
        precision: what activations are rounded to before products.
        threads: that compute a step.
        max_tokens: most tokens of a step.
    """

    def __init__(
        self,
        program: ops.StepProgram,
        spec: DecoderSpec,
        weights: ModelWeights,
        matrices: Mapping[str, PackedMatrix],
        layout: KVLayout,
        *,
        kv_dtype: str,
        precision: Precision,
        threads: int,
        max_tokens: int,
    ) -> None:
        self._program = program
        self._spec = spec
        self._layout = layout
        self._precision = precision
        self._threads = threads
        self._max_tokens = max_tokens
        self._shapes = [
            KvShape(KvType[kv_dtype], group.kv_heads, group.head_dim, layout.block_size, len(group.layers))
            for group in layout.groups
        ]
        self._matrices = matrices
        biases = {stack: weights.bias(stack) for op in program.ops for stack in ops.matrices(op)}
        self._biases = {stack: bias for stack, bias in biases.items() if bias is not None}
        self._vectors = {name: weights.vector(name) for op in program.ops for name in ops.vectors(op)}
        self._pools: list[torch.Tensor] = []
        self._model: NativeModel | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(matrix.data.nbytes for matrix in self._matrices.values())

    def block_bytes(self, group: int) -> int:
        return self._shapes[group].block_bytes

    def attach_pools(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        self._pools = [
            torch.frombuffer(mmap.mmap(-1, count * shape.block_bytes), dtype=torch.uint8).view(count, -1)
            for count, shape in zip(num_blocks, self._shapes, strict=True)
        ]
        tables = [
            rope_table(max_model_len, *rope_frequencies(rope, max_model_len)) for rope in self._spec.ropes
        ]
        parts = Parts(self._matrices, self._vectors, self._biases, tables, self._shapes, self._pools)
        self._model = lower(
            self._program, self._spec, self._layout, parts, self._precision, self._threads, self._max_tokens
        )

    def run(self, rows: Sequence[PlanRow], greedy: Sequence[int]) -> StepOutput:
        assert self._model is not None
        token_ids = [token for row in rows for token in row.token_ids]
        stops = list(accumulate(row.n_tokens for row in rows))
        layout = [
            (stop - row.n_tokens, row.n_tokens, row.start) for row, stop in zip(rows, stops, strict=True)
        ]
        width = max(len(table) for row in rows for table in row.tables)
        tables = [
            [row.tables[group] + (0,) * (width - len(row.tables[group])) for row in rows]
            for group in range(len(self._shapes))
        ]
        arguments = (torch.tensor(given, dtype=torch.int32) for given in (token_ids, layout, tables, greedy))
        finite, largest = self._model.step(*arguments)
        return StepOutput(finite.bool().tolist(), largest.tolist())

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self._model is not None
        return self._model.logits(tokens)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            pool = self._pools[copy.source.group]
            pool[copy.target.id] = pool[copy.source.id]
