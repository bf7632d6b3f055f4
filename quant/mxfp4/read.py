"""Expert weights in MXFP4 into the canonical form."""

from __future__ import annotations

from collections.abc import Callable

import torch

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.module import Layout, Module
from appliance.quant.tensor import QuantTensor

_NAN = 255
_SMALLEST = 0x0040


def read(module: Module, layout: Layout, fetch: Callable[[str], torch.Tensor]) -> QuantTensor:
    rows, columns = module.shape
    assert layout.scheme is not None
    scales = _powers(fetch("scales").view(rows, -1))
    return QuantTensor(fetch("blocks").view(rows, columns // 2), scales, module.shape, layout.scheme)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 → bfloat16 2**(exponent - 127): its own exponent has that bias too, but 2**-127 is subnormal in it."""
    if bool((exponents == _NAN).any()):
        raise CheckpointError(f"scales hold {_NAN}, which is NaN, expected exponents up to {_NAN - 1}")
    powers = exponents.short() << 7
    return powers.masked_fill_(exponents == 0, _SMALLEST).view(torch.bfloat16)
