"""A model's weights on the GPU: read and packed one matrix after the other, as the step program names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from appliance.engine import program as ops
from appliance.engine.errors import UnsupportedModelError
from appliance.engine.weights import ModelWeights, Progress, read_layers
from appliance.kernels.linear.gpu import Tile, multiply
from appliance.kernels.linear.gpu_dense import multiply_dense
from appliance.kernels.linear.gpu_grouped import ExpertMatrices, stack
from appliance.kernels.linear.gpu_matrix import GpuMatrix
from appliance.quant.gpu_packed import pack_for_gpu
from appliance.quant.tensor import DenseTensor, QuantizedLinear, QuantTensor, Weight

Matrix = GpuMatrix | torch.Tensor
TileFor = Callable[[GpuMatrix, int], Tile]
"""The tile for a matrix and so many rows of x."""


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """y = x · Wᵀ + bias.

    Attributes:
        parts: matrices whose rows are stacked: packed, or dense [rows, columns] of the type that is computed in.
        bias: float32 [rows of all], or None.
    """

    parts: tuple[Matrix, ...]
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        return sum(part.rows if isinstance(part, GpuMatrix) else len(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor, tile_for: TileFor) -> None:
        """[M, columns] → [M, rows]."""
        first = 0
        for part in self.parts:
            stop = first + (part.rows if isinstance(part, GpuMatrix) else len(part))
            bias, target = None if self.bias is None else self.bias[first:stop], out[:, first:stop]
            if isinstance(part, GpuMatrix):
                multiply(part, x, bias=bias, out=target, tile=tile_for(part, len(x)))
            else:
                multiply_dense(part, x, bias=bias, out=target)
            first = stop


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """A product of each expert.

    Attributes:
        matrices: packed, or dense [experts, rows, columns].
        bias: float32 [experts, rows], or None.
    """

    matrices: ExpertMatrices | torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.matrices.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """What a program multiplies with, by the weights that are stacked.

    Attributes:
        experts: by the stacked weights of all the experts.
        vectors: of norms, and sinks, float32.
    """

    linears: dict[tuple[str, ...], GpuLinear] = field(default_factory=dict)
    experts: dict[tuple[tuple[str, ...], ...], GpuExperts] = field(default_factory=dict)
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        held = (self.linears, self.experts, self.vectors)
        return sum(each.nbytes for kind in held for each in kind.values())


def load_gpu_weights(
    program: ops.StepProgram,
    weights: ModelWeights,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> GpuWeights:
    """Everything the program reads, on the device.

    Args:
        dtype: of dense matrices there: float16 or bfloat16.
    """
    loaded = GpuWeights()
    wanted = list(dict.fromkeys(names for op in program.ops for names in _matrices(op)))
    stream = read_layers(weights, wanted, progress)
    gate_up: tuple[tuple[str, ...], QuantizedLinear] | None = None
    for op, following in zip(program.ops, (*program.ops[1:], None), strict=True):
        loaded.vectors.update({name: weights.vector(name).to(device) for name in ops.vectors(op)})
        if isinstance(op, ops.Experts):
            for matrices in (op.gate_ups, op.downs):
                layers = [next(stream)[1] for _ in matrices]
                loaded.experts[matrices] = _stacked(layers, device, dtype)
            continue
        for names in _matrices(op):
            if names in loaded.linears:
                continue
            _, layer = next(stream)
            if isinstance(following, ops.GatedProduct):
                gate_up = names, layer
                continue
            if gate_up is not None:
                gates, layer = _in_order_of_codes(gate_up[1], layer)
                loaded.linears[gate_up[0]] = _placed(gates, device, dtype)
                gate_up = None
            loaded.linears[names] = _placed(layer, device, dtype)
    return loaded


def _in_order_of_codes(
    gate_up: QuantizedLinear, down: QuantizedLinear
) -> tuple[QuantizedLinear, QuantizedLinear]:
    """Both, so that gates and ups come in the order in which the codes of `down` want them.

    So that act-order costs nothing there; elsewhere what a product reads is gathered first.
    """
    codes, parts = down.parts[0], gate_up.parts
    if not isinstance(codes, QuantTensor) or codes.permutation is None or len(down.parts) > 1:
        return gate_up, down
    order, inner = codes.permutation, len(codes.permutation)
    both = torch.cat([order, order + inner])
    if len(parts) == 1:
        ordered = [parts[0].select_rows(both)]
    elif [part.shape[0] for part in parts] == [inner, inner]:
        ordered = [part.select_rows(order) for part in parts]
    else:
        return gate_up, down
    bias = None if gate_up.bias is None else gate_up.bias[both]
    unordered = replace(codes, permutation=None)
    return QuantizedLinear(tuple(ordered), bias), QuantizedLinear((unordered,), down.bias)


def _matrices(op: ops.Op) -> tuple[tuple[str, ...], ...]:
    # A head that is the embedding shares its memory.
    return ((op.weight,),) if isinstance(op, ops.Embed) else ops.matrices(op)


def _placed(layer: QuantizedLinear, device: torch.device, dtype: torch.dtype) -> GpuLinear:
    parts = tuple(_packed(part, device, dtype) for part in layer.parts)
    return GpuLinear(parts, None if layer.bias is None else layer.bias.to(device, torch.float32))


def _packed(weight: Weight, device: torch.device, dtype: torch.dtype) -> Matrix:
    packed = None if isinstance(weight, DenseTensor) else pack_for_gpu(weight, device)
    if packed is not None:
        return packed
    # What is dense already not by way of float32, which of a vocabulary takes gigabytes.
    data = weight.data if isinstance(weight, DenseTensor) else weight.dequantize()
    dense = data.to(device, dtype, copy=True)
    if dtype is torch.float16 and data.dtype is not dtype and not bool(dense.isfinite().all()):
        raise UnsupportedModelError("weights are larger than float16 holds (65,504); set dtype to bfloat16")
    return dense


def _stacked(layers: Sequence[QuantizedLinear], device: torch.device, dtype: torch.dtype) -> GpuExperts:
    """A layer of each expert as one; dense where their matrices are not alike."""
    biases = [layer.bias for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        none = torch.zeros(layers[0].out_features)
        bias = torch.stack([none if each is None else each for each in biases]).to(device, torch.float32)
    parts = [_packed(part, device, dtype) for layer in layers for part in layer.parts]
    packed = [part for part in parts if isinstance(part, GpuMatrix)]
    stacked = stack(packed) if len(packed) == len(parts) == len(layers) else None
    if stacked is not None:
        return GpuExperts(stacked, bias)
    return GpuExperts(torch.stack([layer.dequantize().to(device, dtype) for layer in layers]), bias)
