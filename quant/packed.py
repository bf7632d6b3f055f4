"""Weights of every scheme as packed matrices of the native library, without loss."""

from __future__ import annotations

from dataclasses import replace

import torch

from appliance.kernels.linear import cpu
from appliance.kernels.linear.cpu import Allocate, MatrixLayout, PackedMatrix
from appliance.quant.scheme import Codebook, Mode
from appliance.quant.tensor import QuantTensor, Weight

_SCALES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
# Twice what E2M1's codes stand for, and this much more, are whole and not negative.
_E2M1_OFFSET = 12


def pack(weight: Weight, allocate: Allocate) -> PackedMatrix:
    """A matrix [N, K] for native kernels; `allocate` gives the room that its bytes are written to."""
    if isinstance(weight, QuantTensor):
        return _pack_quantised(_with_plain_numbers(weight), allocate)
    return cpu.pack_dense(weight.data, allocate)


def _pack_quantised(weight: QuantTensor, allocate: Allocate) -> PackedMatrix:
    scheme, (rows, width) = weight.scheme, weight.shape
    groups = -(-width // scheme.group_size)
    group_size = scheme.group_size if groups > 1 else width
    # One group is all columns.
    multiple = cpu.GROUP_MULTIPLE if groups > 1 else cpu.COLUMNS_MULTIPLE
    padded = _up(group_size, multiple)
    columns = groups * padded
    if columns % cpu.COLUMNS_MULTIPLE:
        columns += padded
    layout = MatrixLayout(
        rows=rows,
        columns=columns,
        group=padded,
        codes="u4" if scheme.bits <= 4 else "u8",
        scales="sub" if weight.sub_scales is not None else _SCALES[weight.scales.dtype],
        input_width=width,
        constant=float(1 << (scheme.bits - 1)),
        super_size=scheme.super_size // scheme.group_size * padded if weight.sub_scales is not None else 0,
    )
    scales, values = weight.scales, None
    if weight.zeros is not None:
        layout = replace(layout, offsets="zeros")
    elif weight.biases is not None:
        layout = replace(layout, offsets="biases")
    elif scheme.codebook is not None:
        layout, scales, values = _with_codebook(layout, scheme.codebook, scales)
    return cpu.pack_quantised(
        layout,
        weight.codes,
        scheme.bits,
        group_size,
        scales,
        allocate,
        zeros=weight.zeros,
        biases=weight.biases,
        sub_scales=weight.sub_scales,
        sub_biases=weight.sub_biases,
        values=values,
        inputs=_inputs(weight, group_size, layout),
    )


def _with_plain_numbers(weight: QuantTensor) -> QuantTensor:
    """The same weights with scales of super-blocks only in fp16, and biases of the scales' type."""
    scheme, scales, biases = weight.scheme, weight.scales, weight.biases
    if scheme.super_size and any(
        each is not None and each.dtype is not torch.float16 for each in (scales, biases)
    ):
        assert weight.sub_scales is not None
        scales = weight.of_groups(scales.float()) * weight.sub_scales
        if biases is not None and weight.sub_biases is not None:
            biases = weight.of_groups(biases.float()) * weight.sub_biases
        mode = Mode.AFFINE if biases is not None else Mode.SYM if scheme.codebook is None else scheme.mode
        scheme = replace(scheme, mode=mode, super_size=0)
        return replace(weight, scheme=scheme, scales=scales, biases=biases, sub_scales=None, sub_biases=None)
    if biases is not None and biases.dtype is not scales.dtype:
        return replace(weight, scales=scales.float(), biases=biases.float())
    return weight


def _with_codebook(
    layout: MatrixLayout, codebook: Codebook, scales: torch.Tensor
) -> tuple[MatrixLayout, torch.Tensor, torch.Tensor | None]:
    """Layout, scales and 16-bit values of codes with which the code book's weights are exact."""
    if codebook is Codebook.IQ4_NL:
        table = tuple(int(value) + 128 for value in codebook.values)
        return replace(layout, table=table, constant=128.0), scales, None
    if codebook is Codebook.E2M1 and torch.equal(scales * 0.5 * 2, scales):
        table = tuple(int(2 * value) + _E2M1_OFFSET for value in codebook.values)
        return replace(layout, table=table, constant=float(_E2M1_OFFSET)), scales * 0.5, None
    values = torch.tensor(codebook.values).to(torch.bfloat16).view(torch.int16)
    return replace(layout, codes="bf16", constant=0.0), scales, values


def _inputs(weight: QuantTensor, group_size: int, layout: MatrixLayout) -> torch.Tensor | None:
    """What `PackedMatrix.inputs` must be; None where columns are inputs, then padding."""
    width = weight.shape[1]
    if weight.permutation is None and (layout.group == group_size or width <= group_size):
        return None
    column = torch.arange(width)
    places = column // group_size * layout.group + column % group_size
    inputs = torch.full((layout.columns,), -1, dtype=torch.int32)
    inputs[places] = (column if weight.permutation is None else weight.permutation).int()
    return inputs


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
