"""Random weights of every scheme, with scales of either sign and zero points of any size."""

from __future__ import annotations

import dataclasses

import torch

from appliance.quant.packing import pack_codes
from appliance.quant.scheme import BITS, Codebook, Mode, QuantScheme
from appliance.quant.tensor import QuantTensor

SCHEMES = {
    **{f"sym{bits}": QuantScheme(bits, 32, Mode.SYM) for bits in BITS},
    **{f"zp{bits}": QuantScheme(bits, 32, Mode.ZP) for bits in BITS},
    **{f"affine{bits}": QuantScheme(bits, 32, Mode.AFFINE) for bits in (4, 5)},
    "iq4_nl": QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.IQ4_NL),
    "e2m1": QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.E2M1),
    "e4m3": QuantScheme(8, 32, Mode.CODEBOOK, codebook=Codebook.E4M3),
    "iq4_xs": QuantScheme(4, 32, Mode.CODEBOOK, codebook=Codebook.IQ4_NL, super_size=256),
    "kquant2": QuantScheme(2, 16, Mode.KQUANT, super_size=256),
    "kquant4": QuantScheme(4, 32, Mode.KQUANT, super_size=256),
    "kquant6": QuantScheme(6, 16, Mode.KQUANT, super_size=256),
}
# The GPU has no table of 256 entries.
GPU_SCHEMES = tuple(name for name in SCHEMES if name != "e4m3")
WITH_BIASES = ("affine4", "affine5", "kquant2", "kquant4")


def random_weight(
    name: str, rows: int, columns: int, group_size: int, dtype: torch.dtype = torch.float16
) -> QuantTensor:
    scheme = SCHEMES[name]
    if not scheme.super_size:
        scheme = dataclasses.replace(scheme, group_size=group_size)
    groups = -(-columns // scheme.group_size)
    supers = -(-columns // scheme.super_size) if scheme.super_size else groups
    codes = torch.randint(0, 1 << scheme.bits, (rows, columns), dtype=torch.uint8)
    if scheme.codebook is Codebook.E4M3:
        codes[codes & 0x7F == 0x7F] = 0x80
    if scheme.codebook is Codebook.E2M1:
        dtype = torch.bfloat16

    def subs() -> torch.Tensor | None:
        return torch.randint(-128, 128, (rows, groups), dtype=torch.int8) if scheme.super_size else None

    zeros = torch.randint(0, 256, (rows, groups), dtype=torch.uint8)
    biased = name in WITH_BIASES
    return QuantTensor(
        pack_codes(codes, scheme.bits),
        (torch.rand(rows, supers) - 0.3).to(dtype),
        (rows, columns),
        scheme,
        zeros=zeros if scheme.mode is Mode.ZP else None,
        biases=torch.randn(rows, supers).to(dtype) if biased else None,
        sub_scales=subs(),
        sub_biases=subs() if biased else None,
    )


def random_gpu_weight(
    name: str, rows: int, columns: int, group_size: int, dtype: torch.dtype = torch.float16
) -> QuantTensor:
    """With zero points as far as the GPU's matrices of up to 4 bits have them, and further than any format does."""
    weight = random_weight(name, rows, columns, group_size, dtype)
    if weight.zeros is None or SCHEMES[name].bits > 4:
        return weight
    return dataclasses.replace(weight, zeros=weight.zeros & 127)
