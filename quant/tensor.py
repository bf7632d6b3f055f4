"""The canonical form of weights: integer codes with per-group metadata, or a dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from appliance.quant.errors import CheckpointError
from appliance.quant.packing import packed_bytes, unpack_codes
from appliance.quant.scheme import Mode, QuantScheme

DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of a QuantTensor, those with a row for each output.
_ROW_FIELDS = ("codes", "scales", "zeros", "biases", "sub_scales", "sub_biases")


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A quantised weight matrix [N, K], N outputs and K inputs, in G = ceil(K / group_size) groups along K.

    Attributes:
        codes: uint8 [N, ceil(K * bits / 8)], packed as `pack_codes` does.
        scales: fp16, bf16 or fp32 [N, G]; with super-blocks [N, ceil(K / super_size)].
        shape: (N, K).
        zeros: uint8 [N, G] in mode ZP.
        biases: as `scales`, in mode AFFINE and in those KQUANT formats that have them.
        sub_scales: int8 [N, G] with super-blocks: a group's scale is sub_scale * scale.
        sub_biases: int8 [N, G] with super-blocks that have biases: a group's bias is sub_bias * bias.
        permutation: int64 [K], where codes are not in the order of the inputs: column j belongs to input
            permutation[j].

    Raises:
        CheckpointError: shapes or dtypes contradict the scheme.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]
    scheme: QuantScheme
    zeros: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    sub_scales: torch.Tensor | None = None
    sub_biases: torch.Tensor | None = None
    permutation: torch.Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if rows < 1 or columns < 1:
            raise CheckpointError(f"weight of shape {self.shape}, expected at least one row and column")
        scheme, mode = self.scheme, self.scheme.mode
        groups = (rows, -(-columns // scheme.group_size))
        supers = (rows, -(-columns // (scheme.super_size or scheme.group_size)))
        _expect("codes", self.codes, (torch.uint8,), (rows, packed_bytes(columns, scheme.bits)))
        _expect("scales", self.scales, DENSE_DTYPES, supers)
        may_have_biases = mode is Mode.AFFINE or (mode is Mode.KQUANT and self.biases is not None)
        has_subs = scheme.super_size > 0
        for name, tensor, wanted, dtypes, shape in (
            ("zeros", self.zeros, mode is Mode.ZP, (torch.uint8,), groups),
            ("biases", self.biases, may_have_biases, DENSE_DTYPES, supers),
            ("sub-scales", self.sub_scales, has_subs, (torch.int8,), groups),
            ("sub-biases", self.sub_biases, has_subs and may_have_biases, (torch.int8,), groups),
        ):
            if (tensor is not None) != wanted:
                found = "none" if tensor is None else "some"
                raise CheckpointError(f"{found} {name} in mode {mode.value}")
            if tensor is not None:
                _expect(name, tensor, dtypes, shape)
        if self.permutation is not None:
            _expect("permutation", self.permutation, (torch.int64,), (columns,))

    def dequantize(self) -> torch.Tensor:
        """The weights as float32 [N, K], inputs in their own order, bit for bit what the making tool computes."""
        rows, columns = self.shape
        scales, biases = self.scales.float(), None if self.biases is None else self.biases.float()
        if self.sub_scales is not None:
            scales = self.of_groups(scales) * self.sub_scales
        if biases is not None and self.sub_biases is not None:
            biases = self.of_groups(biases) * self.sub_biases
        weights = self._grouped(self._values())
        weights *= scales.unsqueeze(-1)
        if biases is not None:
            weights += biases.unsqueeze(-1)
        if not self.scheme.signed_zeros:
            weights += 0.0
        weights = weights.view(rows, -1)[:, :columns]
        if self.scheme.dtype != "float32":
            weights = weights.to(getattr(torch, self.scheme.dtype)).float()
        if self.permutation is None:
            return weights.contiguous()
        return torch.empty_like(weights).index_copy_(1, self.permutation, weights)

    def _values(self) -> torch.Tensor:
        """What is scaled: float32 [N, K], in the order of the codes."""
        codes = unpack_codes(self.codes, self.scheme.bits, self.shape[1])
        if self.scheme.codebook is not None:
            return torch.tensor(self.scheme.codebook.values)[codes.int()]
        values = codes.float()
        if self.zeros is not None:
            grouped = self._grouped(values)
            grouped -= self.zeros.unsqueeze(-1)
            return grouped.view(len(values), -1)[:, : self.shape[1]]
        if self.biases is None:
            values -= 1 << (self.scheme.bits - 1)
        return values

    def _grouped(self, values: torch.Tensor) -> torch.Tensor:
        """[N, K] → [N, G, group_size], with zeros where the last group is not full."""
        missing = -self.shape[1] % self.scheme.group_size
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.view(len(values), -1, self.scheme.group_size)

    def of_groups(self, per_super: torch.Tensor) -> torch.Tensor:
        """[N, super-blocks] → [N, G]."""
        repeated = per_super.repeat_interleave(self.scheme.super_size // self.scheme.group_size, dim=1)
        return repeated[:, : -(-self.shape[1] // self.scheme.group_size)]

    def is_finite(self) -> bool:
        """Whether every weight is a finite number, told by the scales and biases; nothing is dequantised.

        A code whose entry in the code book is not a number is left to whoever reads the codes.
        """
        factor = self.scheme.codebook.largest if self.scheme.codebook else 1 << self.scheme.bits
        largest = self.scales.abs().max().float() * factor
        if self.biases is not None:
            largest += self.biases.abs().max().float()
        limit = torch.finfo(getattr(torch, self.scheme.dtype)).max
        return bool(largest <= limit)

    def select_rows(self, index: torch.Tensor | slice) -> QuantTensor:
        """The rows `index` (int64 [M] or a slice), in that order; of a slice, a view."""
        return self._with_rows(lambda name: getattr(self, name)[index])

    def stacks_with(self, other: Weight) -> bool:
        """Whether the rows of both can be one matrix: same K, scheme, dtypes and permutation."""
        if not isinstance(other, QuantTensor) or other.shape[1] != self.shape[1]:
            return False
        if other.scheme != self.scheme or other.scales.dtype is not self.scales.dtype:
            return False
        if (other.biases is None) != (self.biases is None):
            return False
        if self.permutation is None or other.permutation is None:
            return self.permutation is other.permutation
        return torch.equal(self.permutation, other.permutation)

    def _with_rows(self, rows_of: Callable[[str], torch.Tensor]) -> QuantTensor:
        """The same but for its rows: what `rows_of` gives for each field that has some here."""
        rows: dict[str, Any] = {
            name: rows_of(name) for name in _ROW_FIELDS if getattr(self, name) is not None
        }
        shape = (len(rows["codes"]), self.shape[1])
        return QuantTensor(**rows, shape=shape, scheme=self.scheme, permutation=self.permutation)

    @property
    def nbytes(self) -> int:
        tensors = (getattr(self, name) for name in (*_ROW_FIELDS, "permutation"))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, eq=False)
class DenseTensor:
    """A weight that is not quantised: float32, float16 or bfloat16; [N, K], or [N] for norms and biases.

    Raises:
        CheckpointError: another dtype or number of dimensions.
    """

    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.dtype not in DENSE_DTYPES or self.data.dim() not in (1, 2):
            found = f"{self.data.dtype} of shape {tuple(self.data.shape)}"
            raise CheckpointError(f"dense weight is {found}, expected 1 or 2 dimensions of {DENSE_DTYPES}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def dequantize(self) -> torch.Tensor:
        """The weights as float32; the data itself where it already is."""
        return self.data.float()

    def is_finite(self) -> bool:
        """Whether every weight is a finite number."""
        low, high = self.data.aminmax()  # of which both are NaN where any is
        return bool(low.isfinite() & high.isfinite())

    def stacks_with(self, other: Weight) -> bool:
        """Whether the rows of both can be one matrix: same K and dtype."""
        return (
            isinstance(other, DenseTensor)
            and other.data.dtype is self.data.dtype
            and other.shape[1:] == self.shape[1:]
        )

    def select_rows(self, index: torch.Tensor | slice) -> DenseTensor:
        """The rows `index` (int64 [M] or a slice), in that order; of a slice, a view."""
        return DenseTensor(self.data[index])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Weight = QuantTensor | DenseTensor


def stack_rows(parts: Sequence[Weight]) -> Weight:
    """One matrix of the rows of all; each must stack with the first."""
    first = parts[0]
    assert all(first.stacks_with(part) for part in parts)
    if len(parts) == 1:
        return first
    if isinstance(first, DenseTensor):
        return DenseTensor(torch.cat([part.data for part in parts if isinstance(part, DenseTensor)]))
    return first._with_rows(lambda name: torch.cat([getattr(part, name) for part in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear:
    """A linear layer y = x @ W.T + bias; W is `parts` stacked along N, which may differ in format.

    Attributes:
        bias: float [sum of N], or None.

    Raises:
        CheckpointError: no parts, parts of different K, or a bias of another length.
    """

    parts: tuple[Weight, ...]
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shapes = [part.shape for part in self.parts]
        if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][-1] for shape in shapes):
            raise CheckpointError(f"linear layer of parts {shapes}, expected matrices with equally long rows")
        if self.bias is not None and tuple(self.bias.shape) != (self.out_features,):
            raise CheckpointError(f"bias of shape {tuple(self.bias.shape)}, expected ({self.out_features},)")

    @property
    def out_features(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def dequantize(self) -> torch.Tensor:
        """The weights as float32 [out_features, in_features]."""
        weights = [part.dequantize() for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)


def _expect(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise CheckpointError(f"{name} are {found}, expected {' or '.join(map(str, dtypes))} {shape}")
