"""How a code becomes a weight. Imports no torch: the headers of a checkpoint say it before any data is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from appliance.quant.errors import CheckpointError

BITS = (2, 3, 4, 5, 6, 8)
MIN_GROUP_SIZE = 16
SUPER_SIZE = 256


class Mode(Enum):
    """What is added to or looked up for a code before it is scaled."""

    SYM = "sym"
    """w = (code - 2**(bits - 1)) * scale"""

    ZP = "zp"
    """w = (code - zero) * scale, the zero point being an integer of the group"""

    AFFINE = "affine"
    """w = code * scale + bias"""

    KQUANT = "kquant"
    """As SYM, or as AFFINE where there are biases, with scales and biases that are themselves quantised: a
    group's scale is an integer times the scale of its super-block."""

    CODEBOOK = "codebook"
    """w = codebook[code] * scale"""


class Codebook(Enum):
    """Tables of 2**bits weights that codes point into."""

    IQ4_NL = "iq4_nl"
    E2M1 = "e2m1"
    E4M3 = "e4m3"

    @property
    def values(self) -> tuple[float, ...]:
        return _CODEBOOKS[self]

    @property
    def largest(self) -> float:
        """The largest magnitude among the values that are numbers."""
        return max(abs(value) for value in self.values if value == value)


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Everything that two weights must share to be one matrix.

    Attributes:
        bits: of a code.
        group_size: how many consecutive weights of a (permuted) row share their scale.
        dtype: in which the tool that made the checkpoint computes a weight, and so rounds it: "float16",
            "bfloat16" or "float32".
        codebook: in mode CODEBOOK.
        super_size: how many weights of a row share a super-block's scale; 0 where scales are not quantised.
        signed_zeros: whether nought times a negative scale is -0, as in a product, or 0, as in a sum of products.

    Raises:
        CheckpointError: a combination that no format has.
    """

    bits: int
    group_size: int
    mode: Mode
    dtype: str = "float32"
    codebook: Codebook | None = None
    super_size: int = 0
    signed_zeros: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise CheckpointError(f"codes of {self.bits} bits, expected one of {BITS}")
        if self.group_size < MIN_GROUP_SIZE:
            raise CheckpointError(f"group size {self.group_size}, expected {MIN_GROUP_SIZE} or more")
        if (self.codebook is not None) != (self.mode is Mode.CODEBOOK):
            raise CheckpointError(f"mode {self.mode.value} with code book {self.codebook}")
        if self.codebook is not None and len(self.codebook.values) != 1 << self.bits:
            raise CheckpointError(
                f"{self.bits}-bit codes into a code book of {len(self.codebook.values)} weights"
            )
        if self.super_size % self.group_size or (self.mode is Mode.KQUANT and not self.super_size):
            raise CheckpointError(f"super-blocks of {self.super_size} weights in groups of {self.group_size}")


def _e4m3(byte: int) -> float:
    """fp8 without infinities (OCP 8-bit floating point, E4M3): 4 exponent bits, 3 of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if byte & 0x80 else magnitude


# ggml-common.h, kvalues_iq4nl.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# OCP microscaling formats, FP4 E2M1: sign, two exponent bits, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODEBOOKS = {
    Codebook.IQ4_NL: tuple(float(value) for value in _IQ4_NL),
    Codebook.E2M1: _E2M1 + tuple(-value for value in _E2M1),
    Codebook.E4M3: tuple(_e4m3(byte) for byte in range(256)),
}
