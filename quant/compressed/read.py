"""Linear layers of compressed-tensors into the canonical form.

compressed-tensors stores signed q and computes (q - z) * scale in the dtype of the scales. Packed, q is stored as
q + 2**(bits - 1), which is the canonical code; there, the zero point is moved alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from appliance.kernels.repack import reorder_codes
from appliance.quant.compressed.layout import is_dense
from appliance.quant.errors import CheckpointError
from appliance.quant.hf.module import Layout, Module
from appliance.quant.packing import pack_codes, packed_bytes, unpack_codes
from appliance.quant.scheme import QuantScheme
from appliance.quant.tensor import QuantTensor

Fetch = Callable[[str], torch.Tensor]

# Codes are taken apart, where they must be, this many at once.
_CHUNK_CODES = 1 << 20
# But for its sign.
_FP8_NAN = 0x7F


def read_packed(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    found, expected = fetch("weight_shape").tolist(), list(module.shape)
    if found != expected:
        raise CheckpointError(f"weight_shape holds {found}, expected {expected}")
    assert layout.scheme is not None
    words, bits, columns = fetch("weight_packed"), layout.scheme.bits, module.shape[1]
    if is_dense(module, bits):
        codes = words.view(torch.uint8)[:, : packed_bytes(columns, bits)].contiguous()
    else:
        codes = torch.empty(len(words), packed_bytes(columns, bits), dtype=torch.uint8)
        for some, out in zip(_chunks(words, columns), _chunks(codes, columns), strict=True):
            out.copy_(pack_codes(_unpack_padded(some, bits, columns), bits))
    return _integers(module, layout, fetch, codes)


def read_int(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    assert layout.scheme is not None
    bits = layout.scheme.bits
    codes = pack_codes(_unsigned("weight", fetch("weight"), bits), bits)
    return _integers(module, layout, fetch, codes)


def read_fp8(module: Module, layout: Layout, fetch: Fetch) -> QuantTensor:
    codes = fetch("weight").view(torch.uint8)
    if any((some.numpy() & _FP8_NAN).max() == _FP8_NAN for some in _chunks(codes, module.shape[1])):
        raise CheckpointError("weight holds NaN, expected numbers")
    assert layout.scheme is not None
    return QuantTensor(codes, _scales(module, layout, fetch), module.shape, layout.scheme)


def _integers(module: Module, layout: Layout, fetch: Fetch, codes: torch.Tensor) -> QuantTensor:
    scheme, zeros, permutation = layout.scheme, None, None
    assert scheme is not None
    if "weight_zero_point" in layout.uses:
        zeros = fetch("weight_zero_point")
        if zeros.dtype is torch.int8:
            zeros = _of_rows(module, layout, _unsigned("weight_zero_point", zeros, scheme.bits))
        else:
            words = zeros.T.clone(memory_format=torch.contiguous_format)
            unpack = _unpack_dense if is_dense(module, scheme.bits) else _unpack_padded
            zeros = unpack(words, scheme.bits, module.shape[0]).T.contiguous()
    if "weight_g_idx" in layout.uses:
        permutation = _permutation(fetch("weight_g_idx").long(), scheme)
    if permutation is not None:
        codes = reorder_codes(codes, permutation, scheme.bits)
    scales = _scales(module, layout, fetch)
    return QuantTensor(codes, scales, module.shape, scheme, zeros=zeros, permutation=permutation)


def _scales(module: Module, layout: Layout, fetch: Fetch) -> torch.Tensor:
    scales = fetch("weight_scale")
    # In one pass: NaN becomes both.
    if not all(math.isfinite(value) for value in scales.aminmax()):
        raise CheckpointError("weight_scale holds NaN or infinity, expected numbers")
    return _of_rows(module, layout, scales)


def _of_rows(module: Module, layout: Layout, shared: torch.Tensor) -> torch.Tensor:
    """What several rows share, for each: [N, G]."""
    if layout.rows_per_scale == 1:
        return shared
    matrix = shared.view(1, 1) if shared.numel() == 1 else shared
    return matrix.repeat_interleave(layout.rows_per_scale, dim=0)[: module.shape[0]].contiguous()


def _unsigned(what: str, values: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 → uint8 codes, in place."""
    half = 1 << (bits - 1)
    low, high = (values.numpy().min(), values.numpy().max()) if bits < 8 else (-half, half - 1)
    if low < -half or high >= half:
        raise CheckpointError(
            f"{what} holds {low} to {high}, expected {-half} to {half - 1} as the configuration says {bits} bits"
        )
    return values.view(torch.uint8).add_(half)


def _unpack_dense(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [M, words], rows in streams of bits → uint8 [M, count]."""
    return unpack_codes(words.view(torch.uint8)[:, : packed_bytes(count, bits)], bits, count)


def _unpack_padded(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [M, words], no code crossing a word → uint8 [M, count]."""
    per_word, mask = 32 // bits, (1 << bits) - 1
    codes = torch.empty(len(words), words.shape[1] * per_word, dtype=torch.uint8)
    for place in range(per_word):
        codes[:, place::per_word] = words >> (place * bits) & mask
    return codes[:, :count]


def _permutation(groups: torch.Tensor, scheme: QuantScheme) -> torch.Tensor | None:
    """The inputs in the order of the groups that they are in; None where that is their own.

    Args:
        groups: int64 [K]; all -1 where the tool made the tensor but ordered nothing.
    """
    size, columns = scheme.group_size, len(groups)
    if bool((groups == -1).all()):
        return None
    low, high = (int(value) for value in groups.aminmax())
    if low < 0 or high >= columns // size:
        raise CheckpointError(f"weight_g_idx holds {low} to {high}, expected 0 to {columns // size - 1}")
    counts = groups.bincount(minlength=columns // size)
    if bool((counts != size).any()):
        group = int((counts != size).int().argmax())
        raise CheckpointError(
            f"weight_g_idx has {int(counts[group])} columns in group {group}, expected {size} in each"
        )
    order = groups.argsort(stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order


def _chunks(rows: torch.Tensor, columns: int) -> tuple[torch.Tensor, ...]:
    return torch.split(rows, max(1, _CHUNK_CODES // columns))
