"""What checkpoints are read: the tables that refusals go by, in one place for people. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.quant.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from appliance.quant.gguf.supported import TENSOR_TYPES
from appliance.quant.hf.formats import FORMATS


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Whatever is not listed here is refused from a checkpoint's headers.

    Attributes:
        architectures: as config.json names them.
        gguf_architectures: as GGUF files do.
        methods: ways to quantise, as `quant_method` names them.
        tensor_types: of GGUF tensors.
    """

    architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    methods: tuple[str, ...]
    tensor_types: tuple[str, ...]


CAPABILITIES = Capabilities(
    architectures=tuple(sorted(ARCHITECTURES)),
    gguf_architectures=tuple(sorted(GGUF_ARCHITECTURES)),
    methods=tuple(sorted(method for format_ in FORMATS for method in format_.methods if method)),
    tensor_types=TENSOR_TYPES,
)
