"""The executor of the Triton kernels: an operation is a launch or a few, and nothing waits for the device in between.

The residual stream, the logits and the sums inside kernels are float32; what products and attention take is float16 or
bfloat16. Under Triton's interpreter the same code runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from appliance.engine import program as ops
from appliance.engine.executors.base import StepOutput, largest_logits
from appliance.engine.executors.gpu_batch import GpuBatch, build_gpu_batch
from appliance.engine.executors.gpu_program import FinishQkv, finish_qkv_at_once
from appliance.engine.executors.gpu_weights import TileFor, load_gpu_weights
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.logit_rules import on_device
from appliance.engine.spec import Activation, ClampedSwiglu, DecoderSpec
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.embedding.gpu import embed
from appliance.kernels.gated_product.gpu import gated_product
from appliance.kernels.kv_layout import KVLayout, as_bytes
from appliance.kernels.linear.gpu import tile_for
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.kernels.moe.gpu import route, run_experts
from appliance.kernels.paged_attention.gpu import paged_attention
from appliance.kernels.qkv.gpu import QKNorm, finish_qkv
from appliance.kernels.rms_norm.gpu import rms_norm
from appliance.kernels.rope import rope_table


class GpuExecutor:
    """Runs a step program over one model's weights and KV pools, all on the device.

    Args:
        weights: read while loading, a few matrices at a time, and let go.
        layout: whose groups keep `dtype` or int8.
        device: of CUDA; the CPU under Triton's interpreter.
        dtype: float16 or bfloat16, of what products and attention take.
        progress: told how far reading the weights has come.
        tile_for: of products with packed matrices.
    """

    def __init__(
        self,
        program: ops.StepProgram,
        spec: DecoderSpec,
        weights: ModelWeights,
        layout: KVLayout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress,
        tile_for: TileFor = tile_for,
    ) -> None:
        self._program = program
        self._body = finish_qkv_at_once(program.body)
        self._spec = spec
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._weights = load_gpu_weights(program, weights, device, dtype, progress)
        self._tile_for = tile_for
        self._exact = {program.hidden, program.output}
        self._exact |= {op.logits for op in program.ops if isinstance(op, ops.Route)}
        self._pools: tuple[torch.Tensor, ...] = ()
        self._ropes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers: dict[str, torch.Tensor] = {}
        # Of the last step.
        self._hidden = torch.empty(0)

    @property
    def packed_matrices(self) -> list[GpuMatrix]:
        """Those that are multiplied by tiles of one's choice."""
        parts = (part for linear in self._weights.linears.values() for part in linear.parts)
        return [part for part in parts if isinstance(part, GpuMatrix)]

    @property
    def weight_bytes(self) -> int:
        return self._weights.nbytes

    def block_bytes(self, group: int) -> int:
        return self._layout.block_bytes(group)

    def attach_pools(self, num_blocks: Sequence[int], max_model_len: int) -> None:
        tables = (rope_table(max_model_len, *rope_frequencies(r, max_model_len)) for r in self._spec.ropes)
        self._ropes = [(cos.to(self._device), sin.to(self._device)) for cos, sin in tables]
        memory = (
            torch.zeros(count * self._layout.block_bytes(group), dtype=torch.uint8, device=self._device)
            for group, count in enumerate(num_blocks)
        )
        self._pools = tuple(self._layout.view(group, each) for group, each in enumerate(memory))

    def run(self, rows: Sequence[PlanRow], greedy: Sequence[int]) -> StepOutput:
        with torch.inference_mode(), self._current():
            self._hidden = self.launch(build_gpu_batch(rows, self._layout.block_size, self._device))
            return StepOutput(
                self._hidden.isfinite().all(dim=-1), largest_logits(self, greedy, self._spec.vocab_size)
            )

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(), self._current():
            return self.head(self._hidden[on_device(list(tokens), torch.int64, self._device)])

    def launch(self, batch: GpuBatch) -> torch.Tensor:
        """The body of the program: hidden states of all tokens, float32 [tokens, hidden]. Nothing waits.

        To be called in inference mode, with the device the thread's own.
        """
        self._buffers.clear()
        for op in self._body:
            self._HANDLERS[type(op)](self, op, batch)
        hidden = self._buffers[self._program.hidden]
        self._buffers.clear()
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocab] of hidden states; as `launch`."""
        self._buffers[self._program.hidden] = hidden
        for op in self._program.head:
            self._HANDLERS[type(op)](self, op, None)
        logits = self._buffers[self._program.output]
        self._buffers.clear()
        return logits

    def _current(self) -> AbstractContextManager[object]:
        """Makes the device the thread's own, where Triton launches."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def pool_bytes(self, group: int) -> torch.Tensor:
        return as_bytes(self._pools[group])

    def _new(self, name: str, rows: int, width: int) -> torch.Tensor:
        """The buffer `name`, [rows, width], with anything in it."""
        dtype = torch.float32 if name in self._exact else self._dtype
        self._buffers[name] = torch.empty(rows, width, dtype=dtype, device=self._device)
        return self._buffers[name]

    def _input(self, name: str) -> torch.Tensor:
        """A buffer as products take it."""
        return self._buffers[name].to(self._dtype)

    def _embed(self, op: ops.Embed, batch: GpuBatch) -> None:
        (table,) = self._weights.linears[op.weight,].parts
        out = self._new(op.out, len(batch.token_ids), self._spec.hidden_size)
        embed(out, batch.token_ids, table, op.scale)

    def _rms_norm(self, op: ops.RmsNorm, _batch: GpuBatch | None) -> None:
        x = self._buffers[op.x]
        rms_norm(self._new(op.out, *x.shape), x, self._weights.vectors[op.weight], op.eps)

    def _linear(self, op: ops.Linear, _batch: GpuBatch | None) -> None:
        x, linear = self._input(op.x), self._weights.linears[op.weights]
        linear(x, self._new(op.out, len(x), linear.rows), self._tile_for)

    def _finish_qkv(self, op: FinishQkv, batch: GpuBatch) -> None:
        qkv, vectors = self._buffers[op.qkv], self._weights.vectors
        group, layer = self._layout.place(op.layer)
        norm = None
        if op.norm is not None:
            of_q, of_k = vectors[op.norm.q_weight], vectors[op.norm.k_weight]
            norm = QKNorm(of_q, of_k, op.norm.eps, op.norm.whole)
        queries = qkv.new_empty(len(qkv), self._spec.num_heads, self._spec.head_dim)
        rope = None if op.rope is None else self._ropes[op.rope]
        where = (batch.positions, batch.blocks[group], batch.offsets)
        finish_qkv(queries, qkv, self._pools[group], layer, *where, norm, rope)
        self._buffers[op.qkv] = queries

    def _attention(self, op: ops.PagedAttention, batch: GpuBatch) -> None:
        queries = self._buffers[op.qkv]
        group, layer = self._layout.place(op.layer)
        out = self._new(op.out, len(queries), self._spec.num_heads * self._spec.head_dim)
        paged_attention(
            out.view(queries.shape),
            queries,
            self._pools[group],
            layer,
            batch.tables[group],
            batch.starts,
            batch.contexts,
            batch.counts,
            op.scale,
            op.window,
            op.softcap,
            self._weights.vectors[op.sinks] if op.sinks else None,
        )

    def _route(self, op: ops.Route, _batch: GpuBatch | None) -> None:
        logits = self._buffers[op.logits]
        chosen = logits.new_empty(len(logits), op.top_k, dtype=torch.int32)
        weights = torch.empty_like(chosen, dtype=torch.float32)
        route(chosen, weights, logits, op.normalised)
        self._buffers[op.chosen], self._buffers[op.weights] = chosen, weights

    def _experts(self, op: ops.Experts, _batch: GpuBatch | None) -> None:
        experts = self._weights.experts
        x, gate_ups, downs = self._input(op.x), experts[op.gate_ups], experts[op.downs]
        run_experts(
            self._new(op.out, *x.shape),
            x,
            self._buffers[op.chosen],
            self._buffers[op.weights],
            gate_ups.matrices,
            downs.matrices,
            *_activation(op.activation),
            gate_up_bias=gate_ups.bias,
            down_bias=downs.bias,
        )

    def _gated_product(self, op: ops.GatedProduct, _batch: GpuBatch | None) -> None:
        gate_up = self._buffers[op.gate_up]
        out = self._new(op.out, len(gate_up), gate_up.shape[1] // 2)
        gated_product(out, gate_up, op.activation.value)

    def _add_to(self, op: ops.AddTo, _batch: GpuBatch | None) -> None:
        self._buffers[op.target].add_(self._buffers[op.x], alpha=op.scale)

    def _scale_logits(self, op: ops.ScaleLogits, _batch: GpuBatch | None) -> None:
        logits = self._buffers[op.logits].mul_(op.scale)
        if op.softcap:
            logits.div_(op.softcap).tanh_().mul_(op.softcap)

    # Of the class: methods bound to the executor would make a cycle of it, and its memory would wait for a collection.
    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        ops.Embed: _embed,
        ops.RmsNorm: _rms_norm,
        ops.Linear: _linear,
        FinishQkv: _finish_qkv,
        ops.PagedAttention: _attention,
        ops.Route: _route,
        ops.Experts: _experts,
        ops.GatedProduct: _gated_product,
        ops.AddTo: _add_to,
        ops.ScaleLogits: _scale_logits,
    }


def _activation(activation: Activation | ClampedSwiglu) -> tuple[str, float, float]:
    """Its name, and alpha and limit where it has them."""
    if isinstance(activation, ClampedSwiglu):
        return "clamped_swiglu", activation.alpha, activation.limit
    return activation.value, 1.0, 0.0
