"""A linear layer as the torch executor runs it: in slices of rows, dequantised at load or at each use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.kernels.linear import linear, row_tiles
from appliance.quant.tensor import QuantizedLinear, Weight

# What of a packed matrix is unpacked at once.
_SLICE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Slice:
    """Some rows of a matrix: `dense_t` is [in, out] float32, or None where they stay packed."""

    packed: Weight | None
    dense_t: torch.Tensor | None
    tiles: tuple[int, ...]

    def weight_t(self) -> torch.Tensor:
        if self.dense_t is not None:
            return self.dense_t
        assert self.packed is not None
        return self.packed.dequantize().t().contiguous()


class Matrix:
    """y = x · Wᵀ + bias. Dense and packed matrices give the same bits.

    Args:
        dense: keep the weights dequantised, in float32.
    """

    def __init__(self, layer: QuantizedLinear, *, dense: bool) -> None:
        self._bias = layer.bias
        self._slices = [_slice(rows, dense=dense) for part in layer.parts for rows in _split(part)]
        self.nbytes = (
            sum(some.dense_t.nbytes for some in self._slices if some.dense_t is not None)
            if dense
            else layer.nbytes
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], float32."""
        parts = [linear(x, some.weight_t(), None, some.tiles) for some in self._slices]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return y if self._bias is None else y.add_(self._bias)


def _split(part: Weight) -> list[Weight]:
    rows, columns = part.shape
    size = max(1, _SLICE_BYTES // (4 * columns))
    return [part.select_rows(slice(start, start + size)) for start in range(0, rows, size)]


def _slice(rows: Weight, *, dense: bool) -> _Slice:
    tiles = row_tiles(rows.shape[1], rows.shape[0])
    if dense:
        return _Slice(None, rows.dequantize().t().contiguous(), tiles)
    return _Slice(rows, None, tiles)
