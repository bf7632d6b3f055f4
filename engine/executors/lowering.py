"""A step program as operations of the native library, some of which are several of the program's at once.

Fused are: a norm into the product that alone reads it, a gated product likewise, a product with its addition to the
residual stream, a norm with its addition, and what happens between the qkv product and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from appliance.engine import program as ops
from appliance.engine.spec import Activation, ClampedSwiglu, DecoderSpec
from appliance.kernels.kv_layout import KVLayout
from appliance.kernels.linear.cpu import PackedMatrix, Precision
from appliance.kernels.paged_attention.cpu import KvShape
from appliance.kernels.runtime.model import Heads, NativeModel, Source, gated, normed, plain


@dataclass(frozen=True, slots=True)
class Parts:
    """What the program's names stand for.

    Attributes:
        matrices: by the name of a weight.
        vectors: norm weights and sinks, float32.
        biases: of stacked weights, float32.
        ropes: cosines and sines [positions, rotary_dim / 2] of each of the spec's ropes.
        shapes, pools: of each KV group.
    """

    matrices: Mapping[str, PackedMatrix]
    vectors: Mapping[str, torch.Tensor]
    biases: Mapping[tuple[str, ...], torch.Tensor]
    ropes: Sequence[tuple[torch.Tensor, torch.Tensor]]
    shapes: Sequence[KvShape]
    pools: Sequence[torch.Tensor]


def lower(
    program: ops.StepProgram,
    spec: DecoderSpec,
    layout: KVLayout,
    parts: Parts,
    precision: Precision,
    threads: int,
    max_rows: int,
) -> NativeModel:
    """A native model that computes what the program says."""
    model = NativeModel(threads, max_rows)
    for shape, pool in zip(parts.shapes, parts.pools, strict=True):
        model.group(shape, pool)
    lowering = _Lowering(model, spec, layout, parts, precision, list(program.body))
    while lowering.rest:
        op = lowering.rest.pop(0)
        lowering.HANDLERS[type(op)](lowering, op)
    lowering.head(program)
    model.finish(lowering.buffer(program.hidden, spec.hidden_size), spec.hidden_size)
    return model


@dataclass(slots=True)
class _Lowering:
    """The operations that are left, and what the buffers are by now."""

    model: NativeModel
    spec: DecoderSpec
    layout: KVLayout
    parts: Parts
    precision: Precision
    rest: list[ops.Op]
    _buffers: dict[tuple[str, int], int] = field(default_factory=dict)
    _widths: dict[str, int] = field(default_factory=dict)
    # Of buffers that are made where they are read.
    _pending: dict[str, Source] = field(default_factory=dict)

    def buffer(self, name: str, width: int) -> int:
        """The index of a buffer; one name may stand for buffers of several widths."""
        self._widths[name] = width
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.model.buffer(width)
        return self._buffers[name, width]

    def head(self, program: ops.StepProgram) -> None:
        norm, linear, *scaling = program.head
        assert isinstance(norm, ops.RmsNorm)
        assert isinstance(linear, ops.Linear)
        scale, softcap = 1.0, 0.0
        for op in scaling:
            assert isinstance(op, ops.ScaleLogits)
            scale, softcap = op.scale, op.softcap
        self.rest = [linear]
        self._rms_norm(norm)
        self.model.head(
            self._source(linear.x), self._product(linear.weights), self.spec.vocab_size, scale, softcap
        )

    def _embed(self, op: ops.Embed) -> None:
        out = self.buffer(op.out, self.spec.hidden_size)
        self.model.embed(self.parts.matrices[op.weight], out, op.scale)

    def _rms_norm(self, op: ops.RmsNorm) -> None:
        width = self._widths[op.x]
        x, weight = self.buffer(op.x, width), self.parts.vectors[op.weight]
        following = self.rest[0]
        if isinstance(following, ops.AddTo) and following.x == op.out:
            self.rest.pop(0)
            target = self.buffer(following.target, width)
            self.model.add_normed(x, weight, op.eps, target, following.scale, width)
        elif self._feeds_one_product(op.out):
            self._pending[op.out] = normed(x, width, weight, op.eps)
        else:
            self.model.norm(x, weight, op.eps, self.buffer(op.out, width), width)

    def _gated_product(self, op: ops.GatedProduct) -> None:
        width = self._widths[op.gate_up] // 2
        source = self._gate(self.buffer(op.gate_up, 2 * width), width, op.activation)
        if self._feeds_one_product(op.out):
            self._pending[op.out] = source
        else:
            self.model.gated(source, self.buffer(op.out, width))

    def _linear(self, op: ops.Linear) -> None:
        source, product = self._source(op.x), self._product(op.weights)
        width = sum(self.parts.matrices[name].layout.rows for name in op.weights)
        target, factor = self._added_to(op.out)
        self.model.linear(source, product, self.buffer(target, width), factor=factor)

    def _add_to(self, op: ops.AddTo) -> None:
        width = self._widths[op.x]
        self.model.add(self.buffer(op.x, width), self.buffer(op.target, width), op.scale, width)

    def _qk_rms_norm(self, op: ops.QKRmsNorm) -> None:
        vectors = self.parts.vectors
        self._finish_qkv((vectors[op.q_weight], vectors[op.k_weight], op.eps, op.whole), None)

    def _rope(self, op: ops.Rope) -> None:
        self._finish_qkv(None, op.index)

    def _kv_write(self, op: ops.KvWrite) -> None:
        self.rest.insert(0, op)
        self._finish_qkv(None, None)

    def _finish_qkv(
        self, norms: tuple[torch.Tensor, torch.Tensor, float, bool] | None, rope: int | None
    ) -> None:
        """All that there is up to the write."""
        op = self.rest.pop(0)
        if isinstance(op, ops.Rope):
            rope, op = op.index, self.rest.pop(0)
        assert isinstance(op, ops.KvWrite)
        group, layer = self.layout.place(op.layer)
        tables = None if rope is None else self.parts.ropes[rope]
        self.model.finish_qkv(self._qkv(op.qkv), self._heads, group, layer, norms, tables)

    def _attention(self, op: ops.PagedAttention) -> None:
        group, layer = self.layout.place(op.layer)
        out = self.buffer(op.out, self.spec.num_heads * self.spec.head_dim)
        sinks = self.parts.vectors[op.sinks] if op.sinks else None
        self.model.attend(
            self._qkv(op.qkv), self._heads, out, group, layer, op.window, op.scale, op.softcap, sinks
        )

    def _route(self, op: ops.Route) -> None:
        experts = self._widths[op.logits]
        self.model.route(
            self.buffer(op.logits, experts),
            self.buffer(op.chosen, op.top_k),
            self.buffer(op.weights, op.top_k),
            experts,
            op.top_k,
            op.normalised,
        )

    def _experts(self, op: ops.Experts) -> None:
        top_k, width = self._widths[op.chosen], self._widths[op.x]
        inner = sum(self.parts.matrices[name].layout.rows for name in op.gate_ups[0]) // 2
        target, factor = self._added_to(op.out)
        self.model.experts(
            self._source(op.x),
            self._gate(-1, inner, op.activation),
            self.buffer(op.chosen, top_k),
            self.buffer(op.weights, top_k),
            self.buffer(target, width),
            top_k,
            [self._product(names) for names in op.gate_ups],
            [self._product(names) for names in op.downs],
            factor=factor,
        )

    def _feeds_one_product(self, name: str) -> bool:
        """Whether the operation that follows is a product of this buffer, and what it holds is read by no other."""
        following, *later = self.rest
        if not isinstance(following, ops.Linear) or following.x != name:
            return False
        for op in later:
            if name in _reads(op):
                return False
            if getattr(op, "out", None) == name:
                break
        return True

    def _added_to(self, out: str) -> tuple[str, float | None]:
        """Where a product goes, and the factor with which it is added there; it is stored where that is None."""
        if self.rest and isinstance(self.rest[0], ops.AddTo) and self.rest[0].x == out:
            following = self.rest.pop(0)
            assert isinstance(following, ops.AddTo)
            return following.target, following.scale
        return out, None

    def _source(self, name: str) -> Source:
        if name in self._pending:
            return self._pending.pop(name)
        width = self._widths[name]
        return plain(self.buffer(name, width), width)

    def _gate(self, buffer: int, width: int, activation: Activation | ClampedSwiglu) -> Source:
        if isinstance(activation, ClampedSwiglu):
            return gated(buffer, width, "clamped_swiglu", activation.alpha, activation.limit)
        return gated(buffer, width, activation.value)

    def _product(self, names: tuple[str, ...]) -> int:
        matrices = [self.parts.matrices[name] for name in names]
        return self.model.product(matrices, self.parts.biases.get(names), self.precision)

    def _qkv(self, name: str) -> int:
        return self.buffer(name, (self.spec.num_heads + 2 * self.spec.num_kv_heads) * self.spec.head_dim)

    @property
    def _heads(self) -> Heads:
        return Heads(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)

    HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
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
    }


def _reads(op: ops.Op) -> tuple[str, ...]:
    """The buffers that an operation reads (or changes in place)."""
    names = ("x", "qkv", "gate_up", "logits", "chosen", "weights", "target")
    values = (getattr(op, name, "") for name in names)
    return tuple(value for value in values if isinstance(value, str))
