"""A model as the native library runs it: operations over named buffers, one call a step. Calls release the GIL.

The operations are those of kernels/runtime/ops.h. Tensors that they name are kept alive with the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from appliance.kernels import native
from appliance.kernels.gated_product import ACTIVATIONS
from appliance.kernels.linear.cpu import PRECISIONS, Matrix, PackedMatrix, Precision
from appliance.kernels.paged_attention.cpu import KvShape


class Source(ctypes.Structure):
    """What the rows of a product are made of: `struct SourceSpec` of api.cpp. Made by the functions below."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("buffer", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("width", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
    )


def plain(buffer: int, width: int) -> Source:
    """Rows of a buffer as they are."""
    return Source(kind=0, buffer=buffer, width=width)


def normed(buffer: int, width: int, weight: torch.Tensor, eps: float) -> Source:
    """Rows of a buffer after RMS norm; `weight` must outlive the model."""
    return Source(kind=1, buffer=buffer, width=width, weight=_floats(weight), eps=eps)


def gated(buffer: int, width: int, activation: str, alpha: float = 0.0, limit: float = 0.0) -> Source:
    """activation(gate) · up, of rows of 2 · width elements."""
    index = ACTIVATIONS.index(activation)
    return Source(kind=2, buffer=buffer, width=width, activation=index, alpha=alpha, limit=limit)


class Heads(ctypes.Structure):
    """Of a qkv buffer: query heads, key heads (as many as value heads), elements of each."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("queries", "keys", "dim"))


class _QkvSteps(ctypes.Structure):
    _fields_ = (
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("whole", ctypes.c_bool),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("half", ctypes.c_int32),
    )


class _StepInput(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("head_count", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("layout", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("head_rows", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
    )


class NativeModel:
    """Built by its methods in the order in which operations run, the last being `finish`.

    Args:
        threads: that compute a step, the caller's being one.
        max_rows: most rows of a step.
    """

    def __init__(self, threads: int, max_rows: int) -> None:
        library = native.library()
        assert library is not None
        self._lib = library
        self._new = library.appliance_model_new
        self._new.restype = ctypes.c_void_p
        self._free = library.appliance_model_free
        self._max_rows = max_rows
        self._vocabulary = 0
        self._alive: list[Any] = []
        self._model = ctypes.c_void_p(self._new(ctypes.c_int(threads), ctypes.c_int(max_rows)))

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._free(self._model)

    def buffer(self, width: int) -> int:
        """A buffer of `max_rows` rows of so many floats; its index."""
        index = int(self._lib.appliance_model_buffer(self._model, ctypes.c_int64(width)))
        self._check(index < 0)
        return index

    def group(self, shape: KvShape, pool: torch.Tensor) -> int:
        """A KV group whose blocks lie in `pool`; its index."""
        fields = shape.native()
        self._alive.append(pool)
        return int(
            self._lib.appliance_model_group(
                self._model, ctypes.byref(fields), ctypes.c_void_p(pool.data_ptr())
            )
        )

    def product(self, parts: Sequence[PackedMatrix], bias: torch.Tensor | None, precision: Precision) -> int:
        """Matrices stacked along their rows, with the bias of all; its index."""
        matrices = [self._matrix(part) for part in parts]
        pointers = (ctypes.c_void_p * len(parts))(*(ctypes.addressof(matrix) for matrix in matrices))
        return int(
            self._lib.appliance_model_product(
                self._model,
                pointers,
                ctypes.c_int(len(parts)),
                self._kept(bias),
                ctypes.c_int(PRECISIONS.index(precision)),
            )
        )

    def embed(self, matrix: PackedMatrix, out: int, scale: float) -> None:
        """out = rows of the matrix · scale."""
        self._call("embed", ctypes.byref(self._matrix(matrix)), out, float(scale))

    def linear(self, source: Source, product: int, out: int, *, factor: float | None = None) -> None:
        """out = the product; with a factor, out += factor · the product."""
        self._call("linear", ctypes.byref(source), product, out, factor is not None, float(factor or 0.0))

    def norm(self, x: int, weight: torch.Tensor, eps: float, out: int, width: int) -> None:
        """out = norm(x)"""
        self._call("norm", x, self._kept(weight), float(eps), out, ctypes.c_int64(width))

    def add(self, x: int, target: int, factor: float, width: int) -> None:
        """target += factor · x"""
        self._call("add", x, None, 0.0, target, float(factor), ctypes.c_int64(width))

    def add_normed(
        self, x: int, weight: torch.Tensor, eps: float, target: int, factor: float, width: int
    ) -> None:
        """target += factor · norm(x)"""
        self._call("add", x, self._kept(weight), float(eps), target, float(factor), ctypes.c_int64(width))

    def gated(self, source: Source, out: int) -> None:
        """out = activation(gate) · up"""
        self._call("gated", ctypes.byref(source), out)

    def finish_qkv(
        self,
        qkv: int,
        heads: Heads,
        group: int,
        layer: int,
        norms: tuple[torch.Tensor, torch.Tensor, float, bool] | None,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Norms (of q, of k, eps, whether of all heads together), rotation by tables, and keys and values kept."""
        steps = _QkvSteps()
        if norms is not None:
            steps.q_norm, steps.k_norm = (self._kept(weight) for weight in norms[:2])
            steps.eps, steps.whole = norms[2:]
        if rope is not None:
            steps.cos, steps.sin = (self._kept(table) for table in rope)
            steps.half = rope[0].shape[1]
        self._call("qkv", qkv, ctypes.byref(heads), ctypes.byref(steps), group, layer)

    def attend(
        self,
        qkv: int,
        heads: Heads,
        out: int,
        group: int,
        layer: int,
        window: int,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Paged attention of the queries of a qkv buffer."""
        self._call(
            "attend",
            qkv,
            ctypes.byref(heads),
            out,
            group,
            layer,
            window,
            float(scale),
            float(softcap),
            self._kept(sinks),
        )

    def route(
        self, logits: int, chosen: int, weights: int, experts: int, top_k: int, normalised: bool
    ) -> None:
        """Each row's experts and their weights."""
        self._call("route", logits, chosen, weights, experts, top_k, normalised)

    def experts(
        self,
        x: Source,
        gate: Source,
        chosen: int,
        weights: int,
        out: int,
        top_k: int,
        gate_ups: Sequence[int],
        downs: Sequence[int],
        *,
        factor: float | None,
    ) -> None:
        """out = the weighted sum of the chosen experts' products; with a factor, out += factor · that.

        Args:
            gate: its buffer is not used.
        """
        count = len(downs)
        self._call(
            "experts",
            ctypes.byref(x),
            ctypes.byref(gate),
            chosen,
            weights,
            out,
            top_k,
            factor is not None,
            float(factor or 0.0),
            (ctypes.c_int32 * count)(*gate_ups),
            (ctypes.c_int32 * count)(*downs),
            count,
        )

    def head(self, source: Source, product: int, vocabulary: int, scale: float, softcap: float) -> None:
        """Logits of the rows that are asked for."""
        self._vocabulary = vocabulary
        self._check(self._call("head", ctypes.byref(source), product, float(scale), float(softcap)))

    def finish(self, hidden: int, width: int) -> None:
        """The model is complete; a row is finite where its part of `hidden` is."""
        self._check(self._call("finish", hidden, ctypes.c_int64(width)))

    def step(
        self,
        token_ids: torch.Tensor,
        layout: torch.Tensor,
        tables: torch.Tensor,
        head_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step. All arguments are int32 and contiguous.

        Args:
            token_ids: [rows].
            layout: [sequences, 3], of each its first row, its number of rows and the position of the first.
            tables: [groups, sequences, width], the blocks in each KV group.
            head_rows: [any], whose largest logit is wanted.

        Returns:
            Which rows are finite (uint8), and of each of `head_rows` the index of the largest logit, -1 where one is
            not a finite number.
        """
        for given in (token_ids, layout, tables, head_rows):
            assert given.dtype is torch.int32
            assert given.is_contiguous()
        assert 0 < len(token_ids) <= self._max_rows
        finite = torch.empty(len(token_ids), dtype=torch.uint8)
        largest = torch.empty_like(head_rows)
        pointers = (ctypes.c_void_p * len(tables))(*(table.data_ptr() for table in tables))
        step = _StepInput(
            len(token_ids),
            len(layout),
            tables.shape[2],
            len(head_rows),
            token_ids.data_ptr(),
            layout.data_ptr(),
            ctypes.addressof(pointers),
            head_rows.data_ptr(),
            largest.data_ptr(),
            finite.data_ptr(),
        )
        self._check(self._lib.appliance_model_step(self._model, ctypes.byref(step)))
        return finite, largest

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocabulary], float32, of rows of the last step."""
        out = torch.empty(len(rows), self._vocabulary)
        if rows:
            ids, count = (ctypes.c_int32 * len(rows))(*rows), ctypes.c_int(len(rows))
            self._check(self._lib.appliance_model_logits(self._model, ids, count, _floats(out)))
        return out

    def _call(self, name: str, *args: Any) -> int:
        converted = [ctypes.c_float(arg) if isinstance(arg, float) else arg for arg in args]
        status: int = getattr(self._lib, f"appliance_model_{name}")(self._model, *converted)
        return status

    @staticmethod
    def _check(failed: int) -> None:
        if failed:
            raise MemoryError(
                "not enough memory or threads for a step; lower max_num_batched_tokens or num_threads, "
                "or free some memory"
            )

    def _matrix(self, packed: PackedMatrix) -> Matrix:
        self._alive.append(packed)
        return packed.matrix()

    def _kept(self, tensor: torch.Tensor | None) -> ctypes.c_void_p | None:
        if tensor is None:
            return None
        self._alive.append(tensor)
        return _floats(tensor)


def _floats(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.dtype is torch.float32
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())
