"""Expert weights in MXFP4 into the canonical form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.module import Layout, Module
from appliance.quant.tensor import QuantTensor

_NAN = 255
# bfloat16 2**(exponent - 127), as int16: its own exponent has that bias too, but 2**-127 is subnormal in it.
_POWERS = np.arange(_NAN, dtype=np.int16) << 7
_POWERS[0] = 0x0040


def read(module: Module, layout: Layout, fetch: Callable[[str], torch.Tensor]) -> QuantTensor:
    rows, columns = module.shape
    assert layout.scheme is not None
    scales = _powers(fetch("scales").view(rows, -1))
    return QuantTensor(fetch("blocks").view(rows, columns // 2), scales, module.shape, layout.scheme)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 → bfloat16 of that shape."""
    values = exponents.numpy()
    if values.max() == _NAN:
        raise CheckpointError(f"scales hold {_NAN}, which is NaN, expected exponents up to {_NAN - 1}")
    return torch.from_numpy(_POWERS[values]).view(torch.bfloat16)
