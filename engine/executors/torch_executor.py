"""The torch executor: the oracle every other executor is held against, and the fallback where there is none.

Runs in float32 on the CPU. The matrices of a small model are dequantised once at load, those of a larger one stay
packed and are dequantised at each use; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from appliance.engine import program as ops
from appliance.engine.batch import Batch, build_batch
from appliance.engine.executors.base import StepOutput, largest_logits
from appliance.engine.executors.matrix import Matrix
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.spec import Activation, ClampedSwiglu, DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights, Progress, read_layers
from appliance.kernels.gated_product import clamped_swiglu_mul, gelu_mul, gelu_tanh_mul, silu_mul
from appliance.kernels.kv_layout import KVLayout, as_bytes
from appliance.kernels.moe import route, run_experts
from appliance.kernels.paged_attention import kv_write, paged_attention
from appliance.kernels.rms_norm import rms_norm
from appliance.kernels.rope import apply_rope, rope_table
from appliance.quant.tensor import Weight

_PRODUCTS = {
    Activation.SILU: silu_mul,
    Activation.GELU: gelu_mul,
    Activation.GELU_TANH: gelu_tanh_mul,
}


class TorchExecutor:
    """Runs a step program over one model's weights and KV pools.

    Args:
        weights: read while loading, one matrix at a time, and let go.
        dense_bytes: the matrices are kept dequantised where all of them take no more than this.
        progress: told how far reading the weights has come.
    """

    def __init__(
        self,
        program: ops.StepProgram,
        spec: DecoderSpec,
        weights: ModelWeights,
        layout: KVLayout,
        dense_bytes: int,
        progress: Progress,
    ) -> None:
        self._program = program
        self._spec = spec
        self._layout = layout
        self._pools: tuple[torch.Tensor, ...] = ()
        self._rope_tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads = torch.get_num_threads()
        self._matrices: dict[tuple[str, ...], Matrix] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        self._embeddings: dict[str, Weight] = {}
        for op in program.ops:
            self._vectors |= {name: weights.vector(name) for name in ops.vectors(op)}
        self._load_matrices(weights, dense_bytes, progress)
        self._buffers: dict[str, torch.Tensor] = {}
        # Of the last step.
        self._batch: Batch | None = None
        self._hidden = torch.empty(0)

    @property
    def weight_bytes(self) -> int:
        matrices = sum(matrix.nbytes for matrix in self._matrices.values())
        return matrices + sum(weight.nbytes for weight in self._embeddings.values())

    def block_bytes(self, group: int) -> int:
        return self._layout.block_bytes(group)

    def attach_pools(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        self._rope_tables = [
            rope_table(max_model_len, *rope_frequencies(rope, max_model_len)) for rope in self._spec.ropes
        ]
        self._pools = tuple(self._layout.allocate(group, count) for group, count in enumerate(num_blocks))

    @torch.inference_mode()
    def run(self, rows: Sequence[PlanRow], greedy: Sequence[int]) -> StepOutput:
        # The tiles were found for this number of threads; another part of the process may have changed it.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        batch = build_batch(rows, self._layout.block_size)
        self._buffers.clear()
        for pool, where in zip(self._pools, batch.groups, strict=True):
            # What a block held before is masked, but not a number times nothing would still not be a number.
            pool[where.write_blocks[where.write_offsets == 0]] = 0
        for op in self._program.body:
            self._HANDLERS[type(op)](self, op, batch)
        self._batch, self._hidden = batch, self._buffers[self._program.hidden]
        self._buffers.clear()
        return StepOutput(
            self._hidden.isfinite().all(dim=-1), largest_logits(self, greedy, self._spec.vocab_size)
        )

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        assert self._batch is not None
        self._buffers[self._program.hidden] = self._hidden[list(tokens)]
        for op in self._program.head:
            self._HANDLERS[type(op)](self, op, self._batch)
        logits = self._buffers[self._program.output]
        self._buffers.clear()
        return logits

    def pool_bytes(self, group: int) -> torch.Tensor:
        return as_bytes(self._pools[group])

    def _load_matrices(self, weights: ModelWeights, dense_bytes: int, progress: Progress) -> None:
        names = [names for op in self._program.ops for names in ops.matrices(op)]
        dense = 4 * sum(weights.elements(name) for name in names) <= dense_bytes
        embeddings = [(op.weight,) for op in self._program.ops if isinstance(op, ops.Embed)]
        # A head that is the embedding shares its memory.
        layers = dict(read_layers(weights, list(dict.fromkeys([*embeddings, *names])), progress))
        self._embeddings = {name: layers[name,].parts[0] for (name,) in embeddings}
        for name in names:
            self._matrices[name] = Matrix(layers.pop(name), dense=dense)

    def _embed(self, op: ops.Embed, batch: Batch) -> None:
        rows = self._embeddings[op.weight].select_rows(batch.token_ids).dequantize()
        self._buffers[op.out] = rows if op.scale == 1.0 else rows * op.scale

    def _rms_norm(self, op: ops.RmsNorm, _batch: Batch) -> None:
        self._buffers[op.out] = rms_norm(self._buffers[op.x], self._vectors[op.weight], op.eps)

    def _linear(self, op: ops.Linear, _batch: Batch) -> None:
        self._buffers[op.out] = self._matrices[op.weights](self._buffers[op.x])

    def _heads(self, qkv: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a qkv buffer as views [rows, heads, head_dim]."""
        spec = self._spec
        heads = self._buffers[qkv].view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        first_v = spec.num_heads + spec.num_kv_heads
        return heads[:, : spec.num_heads], heads[:, spec.num_heads : first_v], heads[:, first_v:]

    def _qk_rms_norm(self, op: ops.QKRmsNorm, _batch: Batch) -> None:
        for heads, name in zip(self._heads(op.qkv), (op.q_weight, op.k_weight), strict=False):
            x = heads.flatten(1) if op.whole else heads
            heads.copy_(rms_norm(x, self._vectors[name], op.eps).view(heads.shape))

    def _rope(self, op: ops.Rope, batch: Batch) -> None:
        q, k, _ = self._heads(op.qkv)
        cos, sin = (table[batch.positions] for table in self._rope_tables[op.index])
        apply_rope(q, cos, sin)
        apply_rope(k, cos, sin)

    def _kv_write(self, op: ops.KvWrite, batch: Batch) -> None:
        group, index = self._layout.place(op.layer)
        _, k, v = self._heads(op.qkv)
        where = batch.groups[group]
        kv_write(self._pools[group], index, k, v, where.write_blocks, where.write_offsets)

    def _attention(self, op: ops.PagedAttention, batch: Batch) -> None:
        group, index = self._layout.place(op.layer)
        q, _, _ = self._heads(op.qkv)
        attended = paged_attention(
            q,
            self._pools[group],
            index,
            batch.query_rows,
            batch.query_positions,
            batch.groups[group].tables,
            batch.active,
            op.scale,
            op.window,
            op.softcap,
            self._vectors[op.sinks] if op.sinks else None,
        )
        self._buffers[op.out] = attended.flatten(1)

    def _route(self, op: ops.Route, _batch: Batch) -> None:
        chosen, weights = route(self._buffers[op.logits], op.top_k, op.normalised)
        self._buffers[op.chosen], self._buffers[op.weights] = chosen, weights

    def _experts(self, op: ops.Experts, _batch: Batch) -> None:
        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            gated = _gated(self._matrices[op.gate_ups[expert]](x), op.activation)
            return self._matrices[op.downs[expert]](gated)

        chosen, weights = self._buffers[op.chosen], self._buffers[op.weights]
        self._buffers[op.out] = run_experts(self._buffers[op.x], chosen, weights, run)

    def _gated_product(self, op: ops.GatedProduct, _batch: Batch) -> None:
        self._buffers[op.out] = _gated(self._buffers[op.gate_up], op.activation)

    def _add_to(self, op: ops.AddTo, _batch: Batch) -> None:
        self._buffers[op.target].add_(self._buffers[op.x], alpha=op.scale)

    def _scale_logits(self, op: ops.ScaleLogits, _batch: Batch) -> None:
        logits = self._buffers[op.logits] * op.scale
        if op.softcap:
            logits = torch.tanh(logits / op.softcap) * op.softcap
        self._buffers[op.logits] = logits

    # Of the class: methods bound to the executor would make a cycle of it, and its memory would wait for a collection.
    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        ops.Embed: _embed,
        ops.RmsNorm: _rms_norm,
        ops.QKRmsNorm: _qk_rms_norm,
        ops.Linear: _linear,
        ops.Rope: _rope,
        ops.KvWrite: _kv_write,
        ops.PagedAttention: _attention,
        ops.Route: _route,
        ops.Experts: _experts,
        ops.GatedProduct: _gated_product,
        ops.AddTo: _add_to,
        ops.ScaleLogits: _scale_logits,
    }


def _gated(gate_up: torch.Tensor, activation: Activation | ClampedSwiglu) -> torch.Tensor:
    if isinstance(activation, ClampedSwiglu):
        return clamped_swiglu_mul(gate_up, activation.alpha, activation.limit)
    return _PRODUCTS[activation](gate_up)
