"""The formats of linear layers in safetensors: which one a layer is in, by its tensors. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.quant.awq import layout as awq
from appliance.quant.compressed import config as compressed_config
from appliance.quant.compressed import layout as compressed
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gptq import layout as gptq
from appliance.quant.hf import autoround, dense
from appliance.quant.hf.module import Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.mxfp4 import layout as mxfp4


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store linear layers.

    Attributes:
        methods: values of `quant_method` that announce it.
        check: refuses what a configuration alone shows not to be read.
        advise: what the configuration claims of a layer, by its name.
        layout: how a layer is stored; None where its tensors are not of this format.
        notes: what a configuration asks for and does not get; sentences for the log.
    """

    methods: tuple[str, ...]
    check: Callable[[QuantConfig], None]
    advise: Callable[[QuantConfig, str], Advice]
    layout: Callable[[Module, QuantConfig], Layout | None]
    notes: Callable[[QuantConfig], tuple[str, ...]] = lambda _config: ()


FORMATS: tuple[Format, ...] = (
    Format(("",), dense.check, dense.advise, dense.layout),
    Format(gptq.METHODS, gptq.check, gptq.advise, gptq.layout),
    Format(autoround.METHODS, autoround.check, autoround.advise, autoround.layout),
    Format((awq.METHOD,), awq.check, awq.advise, awq.layout),
    Format(
        (compressed_config.METHOD,),
        compressed_config.check,
        compressed_config.advise,
        compressed.layout,
        compressed_config.notes,
    ),
    Format(("mxfp4",), mxfp4.check, mxfp4.advise, mxfp4.layout),
)


def announced(config: QuantConfig) -> Format:
    """The format that a configuration announces, after its refusals.

    Raises:
        UnsupportedFormatError: it is not known, or a variant of it is not read.
    """
    for format_ in FORMATS:
        if config.method in format_.methods:
            format_.check(config)
            return format_
    known = ", ".join(sorted(method for format_ in FORMATS for method in format_.methods if method))
    raise UnsupportedFormatError(
        f"{config.source}: quantisation method {config.method!r} is not supported; what works: {known}"
    )


def find_layout(module: Module, config: QuantConfig) -> Layout:
    """How a layer is stored, whatever was announced.

    Raises:
        CheckpointError: a tensor of it is missing or of a wrong shape, or none of its format is there.
        UnsupportedFormatError: a variant that is not read.
    """
    if not module.tensors:
        raise CheckpointError(f"tensor {module.name + '.weight'!r} is missing, in any format")
    for format_ in FORMATS:
        layout = format_.layout(module, config)
        if layout is not None:
            return layout
    found = ", ".join(f"{suffix} {info}" for suffix, info in sorted(module.tensors.items()))
    raise CheckpointError(
        f"the tensors of {module.name} ({found}) are in no known format for a weight of {list(module.shape)}"
    )
