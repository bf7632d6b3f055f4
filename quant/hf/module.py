"""A linear layer as its tensors' headers describe it, and what was found out from them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.quant.errors import CheckpointError
from appliance.quant.hf.file import TensorInfo
from appliance.quant.scheme import QuantScheme

DENSE_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Module:
    """The tensors of one linear layer.

    Attributes:
        name: in the files, e.g. "model.layers.0.self_attn.q_proj".
        shape: (N, K), outputs and inputs, that the model's configuration asks for.
        tensors: by what follows the name and a dot, e.g. "qweight".
    """

    name: str
    shape: tuple[int, int]
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def file(self) -> Path:
        """Where the layer is, for messages."""
        return min(info.file for info in self.tensors.values())

    def expect(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorInfo:
        """The tensor of that suffix.

        Raises:
            CheckpointError: it is missing, or of another dtype or shape.
        """
        wanted = f"{' or '.join(dtypes)} {list(shape)}"
        info = self.tensors.get(suffix)
        if info is None:
            raise CheckpointError(
                f"tensor {self.name + '.' + suffix!r} is missing, expected {wanted}; the layer has only "
                + ", ".join(sorted(self.tensors))
            )
        if info.dtype not in dtypes or info.shape != shape:
            raise CheckpointError(f"{info.file}: tensor {info.name!r} is {info}, expected {wanted}")
        return info


@dataclass(frozen=True, slots=True)
class Layout:
    """How a linear layer is stored.

    Attributes:
        format: e.g. "awq-gemm"; chooses the reader, and is what people are shown.
        scheme: None where the layer is dense.
        uses: suffixes of the tensors that are read; any other is one too many.
        rows_per_scale: how many rows share theirs.
    """

    format: str
    scheme: QuantScheme | None
    uses: tuple[str, ...]
    rows_per_scale: int = 1


@dataclass(frozen=True, slots=True)
class Advice:
    """What the configuration claims of a layer; None where it is silent. Tensors decide, claims are compared.

    Attributes:
        group_size: -1 where a whole row is one group.
    """

    quantized: bool | None = None
    bits: int | None = None
    group_size: int | None = None
