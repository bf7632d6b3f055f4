"""The canonical form of weights: integer codes with per-group metadata, or a dense tensor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from appliance.quant.errors import CheckpointError

BITS = (4, 8)
DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Mode(Enum):
    """How a code becomes a weight. Zero points, sub-scales and code books are added with their readers."""

    SYM = "sym"
    """w = (code - 2**(bits - 1)) * scale"""

    AFFINE = "affine"
    """w = code * scale + bias"""


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Width of a code in bits, how many consecutive weights of a row share their metadata, and the mode."""

    bits: int
    group_size: int
    mode: Mode

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise CheckpointError(f"codes of {self.bits} bits, expected one of {BITS}")
        if self.group_size < 16 or self.group_size % 8:
            raise CheckpointError(f"group size {self.group_size}, expected a multiple of 8 from 16 up")


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A quantised weight matrix [N, K] in row-major order, N outputs and K inputs.

    Attributes:
        codes: uint8 [N, K * bits / 8], packed along K, least significant bits first: with 4 bits, byte j
            holds code 2j in its low nibble and code 2j + 1 in its high one.
        scales: fp16 [N, K / group_size].
        biases: fp16 [N, K / group_size] in mode AFFINE, else None.
        shape: (N, K).

    Raises:
        CheckpointError: shapes or dtypes contradict the scheme.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    biases: torch.Tensor | None
    shape: tuple[int, int]
    scheme: QuantScheme

    def __post_init__(self) -> None:
        rows, columns = self.shape
        bits, group = self.scheme.bits, self.scheme.group_size
        if rows < 1 or columns < 1 or columns % group:
            raise CheckpointError(f"weight of shape {self.shape}, expected a multiple of {group} columns")
        _expect("codes", self.codes, torch.uint8, (rows, columns * bits // 8))
        _expect("scales", self.scales, torch.float16, (rows, columns // group))
        if (self.biases is not None) != (self.scheme.mode is Mode.AFFINE):
            found = "none" if self.biases is None else "biases"
            raise CheckpointError(f"mode {self.scheme.mode.value} with {found}; AFFINE has biases, SYM none")
        if self.biases is not None:
            _expect("biases", self.biases, torch.float16, (rows, columns // group))

    def dequantize(self) -> torch.Tensor:
        """The weights as float32 [N, K], bit for bit what the tool that made the checkpoint computes.

        A code times an fp16 scale is exact in float32, so only the addition of a bias rounds.
        """
        rows, columns = self.shape
        weights = unpack_codes(self.codes, self.scheme.bits).float()
        weights = weights.view(rows, -1, self.scheme.group_size)
        if self.scheme.mode is Mode.SYM:
            weights -= 1 << (self.scheme.bits - 1)
        weights *= self.scales.float().unsqueeze(-1)
        if self.biases is not None:
            weights += self.biases.float().unsqueeze(-1)
        return weights.view(rows, columns)

    def select_rows(self, index: torch.Tensor) -> QuantTensor:
        """The rows `index` (int64 [M]), in that order, as a tensor of their own."""
        biases = None if self.biases is None else self.biases[index]
        shape = (index.numel(), self.shape[1])
        return QuantTensor(self.codes[index], self.scales[index], biases, shape, self.scheme)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes)


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

    def select_rows(self, index: torch.Tensor) -> DenseTensor:
        """The rows `index` (int64 [M]), in that order, as a tensor of their own."""
        return DenseTensor(self.data[index])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Weight = QuantTensor | DenseTensor


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


def unpack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """One code a byte: uint8 [N, K * bits / 8] → uint8 [N, K]. With 8 bits, `codes` itself."""
    if bits == 8:
        return codes
    return torch.stack((codes & 0x0F, codes >> 4), dim=-1).flatten(1)


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)}"
        raise CheckpointError(f"{name} are {found}, expected {dtype} {shape}")
