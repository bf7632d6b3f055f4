"""The executor of the native library: a step is one call."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from appliance.engine import program as ops
from appliance.engine.executors.base import StepOutput
from appliance.engine.executors.lowering import Parts, lower
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.spec import DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVLayout
from appliance.kernels.linear.cpu import PackedMatrix, Precision
from appliance.kernels.memory import anonymous
from appliance.kernels.paged_attention.cpu import KvShape, KvType
from appliance.kernels.rope import rope_table
from appliance.kernels.runtime.model import NativeModel

# Rows of which logits are computed at once (kernels/runtime/ops.h).
_HEAD_ROWS = 32


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
        inputs = (matrix.inputs for matrix in self._matrices.values())
        indices = sum(each.nbytes for each in inputs if each is not None)
        return sum(matrix.data.nbytes for matrix in self._matrices.values()) + indices

    def working_bytes(self, max_model_len: int) -> int:
        """Bytes, not taken yet, that steps will need beside weights and pools."""
        spec, top_k = self._spec, self._spec.experts.top_k if self._spec.experts else 0
        columns = max(matrix.layout.columns for matrix in self._matrices.values())
        panel = 3 * 6 * columns  # of a row: codes, values, scales and sums, for up to three matrices
        heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
        buffers = 4 * (3 * spec.hidden_size + heads * spec.head_dim + 2 * spec.intermediate_size)
        rows = self._max_tokens * (panel + buffers + top_k * (6 * columns + buffers))
        own = self._threads * _HEAD_ROWS * panel + _HEAD_ROWS * 4 * spec.vocab_size
        rotations = len(spec.ropes) * 4 * spec.head_dim * max_model_len
        return rows + own + rotations

    def block_bytes(self, group: int) -> int:
        return self._shapes[group].block_bytes

    def attach_pools(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        self._pools = [
            anonymous(count * shape.block_bytes).view(count, -1)
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
        tables = torch.zeros(len(self._shapes), len(rows), width, dtype=torch.int32)
        for place, row in enumerate(rows):
            for group, table in enumerate(row.tables):
                # By way of an array, which is several times faster than a tensor made of numbers.
                tables[group, place, : len(table)] = torch.frombuffer(array("i", table), dtype=torch.int32)
        ids, places, asked = (torch.tensor(given, dtype=torch.int32) for given in (token_ids, layout, greedy))
        finite, largest = self._model.step(ids, places, tables, asked)
        return StepOutput(finite.bool(), largest)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self._model is not None
        return self._model.logits(tokens)

    def pool_bytes(self, group: int) -> torch.Tensor:
        return self._pools[group]
