"""GPTQ layers into the canonical form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from appliance.kernels.repack import reorder_codes, transpose_words
from appliance.quant.errors import CheckpointError
from appliance.quant.gptq.layout import UNKNOWN, V1, V1_WORDS, V2
from appliance.quant.hf.module import Layout, Module
from appliance.quant.packing import packed_bytes, unpack_codes
from appliance.quant.scheme import Mode
from appliance.quant.tensor import QuantTensor

log = logging.getLogger(__name__)

# A one in each field of a word; 3-bit fields cross words, and are shifted one by one by every tool.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def read(module: Module, layout: Layout, fetch: Callable[[str], torch.Tensor]) -> QuantTensor:
    """A layer of any version, its codes in the order of the groups.

    Raises:
        CheckpointError: groups that are out of range or of unequal size, or scales that are not finite.
    """
    assert layout.scheme is not None
    rows, columns = module.shape
    scheme = layout.scheme
    scales = _scales(fetch("scales"))
    permutation = None
    if "g_idx" in layout.uses:
        group_size, permutation = _order(fetch("g_idx").long(), scales.shape[1], scheme.group_size)
        scheme = replace(scheme, group_size=group_size)
    zeros = _zeros(fetch("qzeros"), module, layout)
    if zeros is None and scheme.mode is Mode.ZP:
        scheme = replace(scheme, mode=Mode.SYM)
    elif zeros is not None and scheme.mode is Mode.SYM:
        log.warning("%s is said to be symmetric, but its zero points differ: the tensors decide", module.name)
        scheme = replace(scheme, mode=Mode.ZP)
    codes = _bit_rows(transpose_words(fetch("qweight")), columns, scheme.bits)
    if permutation is not None:
        codes = reorder_codes(codes, permutation, scheme.bits)
    return QuantTensor(codes, scales, (rows, columns), scheme, zeros, permutation=permutation)


def _scales(stored: torch.Tensor) -> torch.Tensor:
    """[G, N] → fp16 [N, G]."""
    scales = stored.t().half().contiguous()
    lost = ~scales.isfinite() | ((scales == 0) & (stored.t() != 0))
    if lost.any():
        row, group = lost.nonzero()[0].tolist()
        raise CheckpointError(
            f"tensor 'scales' holds {stored[group, row].item()} at {[group, row]}, expected numbers that float16 has; "
            "fetch the file again"
        )
    return scales


def _order(of_group: torch.Tensor, groups: int, claimed: int) -> tuple[int, torch.Tensor | None]:
    """The group size, and in which order the inputs are grouped, None where in their own.

    Args:
        of_group: int64 [K], the group of each input.
        claimed: the group size that shapes allow.
    """
    columns = len(of_group)
    if torch.equal(of_group, torch.arange(columns) // claimed):
        return claimed, None
    low, high = int(of_group.min()), int(of_group.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"tensor 'g_idx' holds {low if low < 0 else high}, expected groups below {groups}"
        )
    counts = torch.bincount(of_group, minlength=groups)
    size = int(counts[0])
    expected = torch.full_like(counts, size)
    expected[-1] = columns - size * (groups - 1)
    if not 0 < expected[-1] <= size or not torch.equal(counts, expected):
        group = int((counts != claimed).nonzero()[0])
        raise CheckpointError(
            f"tensor 'g_idx' puts {int(counts[group])} of {columns} inputs into group {group}, expected {claimed}"
        )
    permutation = torch.argsort(of_group, stable=True)
    return size, None if torch.equal(permutation, torch.arange(columns)) else permutation


def _zeros(stored: torch.Tensor, module: Module, layout: Layout) -> torch.Tensor | None:
    """int32 [G, ceil(N * bits / 32)] → uint8 [N, G]; None where every zero point is in the middle.

    Of a layer that is said to be symmetric, fields that all hold the middle, or all one less, do so whatever the
    version that was announced.
    """
    assert layout.scheme is not None
    bits, rows = layout.scheme.bits, module.shape[0]
    middle = 1 << (bits - 1)
    zeros = unpack_codes(_bit_rows(stored, rows, bits), bits, rows)
    first = int(zeros[0, 0])
    if layout.scheme.mode is Mode.SYM and first in (middle - 1, middle) and bool((zeros == first).all()):
        if layout.format != UNKNOWN and (first == middle) != (layout.format == V2):
            log.warning(
                "%s stores its zero points as %d, not as %s does: the tensors decide",
                module.name,
                first,
                layout.format,
            )
        return None
    if layout.format == UNKNOWN:
        raise CheckpointError(
            "zero points differ though the configurations say that they are symmetric, and these disagree on whether "
            "their format is 'gptq' or 'gptq_v2', whose zero points differ by one; correct the wrong one"
        )
    if layout.format == V1_WORDS and bits in _ONES:
        zeros = unpack_codes(_bit_rows(stored + _ONES[bits], rows, bits), bits, rows)
    elif layout.format in (V1, V1_WORDS):
        zeros = (zeros + 1) & ((1 << bits) - 1)
    if bool((zeros == middle).all()):
        return None
    return zeros.t().contiguous()


def _bit_rows(words: torch.Tensor, fields: int, bits: int) -> torch.Tensor:
    """int32 [M, words] → uint8 [M, bytes], packed as `pack_codes` does: both are streams of bits."""
    packed = words.view(torch.uint8)
    wanted = packed_bytes(fields, bits)
    return packed if packed.shape[1] == wanted else packed[:, :wanted].contiguous()
