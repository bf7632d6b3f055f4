"""Quantised weights of every scheme as matrices of the GPU kernels, without loss."""

from __future__ import annotations

import torch

from appliance.kernels.linear import gpu_matrix
from appliance.kernels.linear.gpu_matrix import BITS, GROUPS, GpuMatrix, block_columns
from appliance.quant.packing import pack_codes, unpack_codes
from appliance.quant.tensor import QuantTensor


def pack_for_gpu(weight: QuantTensor, device: torch.device | None = None) -> GpuMatrix | None:
    """The same weights for GPU kernels; None for code books of 8 bits, whose weights are dense there.

    Codes of 3 bits take 4, of 5 and 6 take 8; of 2 they take 4 where groups are of 16, for a block of 256 columns would
    have so many that the kernel takes minutes to compile.

    Args:
        weight: in main memory.
        device: where the matrix is to be, and most of the work is done; None for main memory.
    """
    scheme, (rows, width) = weight.scheme, weight.shape
    least = 4 if scheme.group_size < 32 else scheme.bits
    bits = next(bits for bits in BITS if bits >= max(least, scheme.bits))
    if scheme.codebook is not None and bits == 8:
        return None
    group = _padded_group(weight, bits)
    is_padded = width > scheme.group_size != group
    columns = -(-width // scheme.group_size) * group if is_padded else width
    inputs, codes = _inputs(weight, group, columns), weight.codes
    if scheme.bits != bits or columns != width:
        bytes_ = codes.new_zeros(rows, columns)
        bytes_[:, _columns(weight, group)] = unpack_codes(codes, scheme.bits, width)
        codes = pack_codes(bytes_, bits)
    scales, biases, supers, super_group = weight.scales, weight.biases, {}, 0
    if weight.sub_scales is not None:
        super_group = scheme.super_size // scheme.group_size * group
        if super_group % block_columns(bits):
            scales, super_group = weight.of_groups(scales.float()) * weight.sub_scales, 0
            if biases is not None and weight.sub_biases is not None:
                biases = weight.of_groups(biases.float()) * weight.sub_biases
        else:
            supers = {"super_scales": scales, "super_biases": biases}
            scales, biases = weight.sub_scales, weight.sub_biases

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    return gpu_matrix.pack(
        codes.to(device),
        scales.to(device),
        bits=bits,
        columns=columns,
        group=group,
        zero=1 << (scheme.bits - 1),
        zeros=there(weight.zeros),
        biases=there(biases),
        super_group=super_group,
        table=None if scheme.codebook is None else scheme.codebook.values,
        inputs=there(inputs),
        input_width=width,
        **{name: there(each) for name, each in supers.items()},
    )


def _padded_group(weight: QuantTensor, bits: int) -> int:
    """The least group that kernels can have which holds one of the weight's."""
    size, block = min(weight.scheme.group_size, weight.shape[1]), block_columns(bits)
    if weight.shape[1] <= weight.scheme.group_size:
        return -(-size // block) * block
    smaller = (group for group in (*GROUPS, block // 2) if size <= group < block)
    return next(smaller, -(-size // block) * block)


def _columns(weight: QuantTensor, group: int) -> torch.Tensor:
    """int64 [K]: where each column is, groups being padded."""
    column, size = torch.arange(weight.shape[1]), weight.scheme.group_size
    return column // size * group + column % size


def _inputs(weight: QuantTensor, group: int, columns: int) -> torch.Tensor | None:
    width = weight.shape[1]
    if weight.permutation is None and columns == width:
        return None
    inputs = torch.full((columns,), -1, dtype=torch.int32)
    inputs[_columns(weight, group)] = (
        torch.arange(width) if weight.permutation is None else weight.permutation
    ).int()
    return inputs
