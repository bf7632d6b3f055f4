"""AutoRound's configurations. Its tensors are those of GPTQ, AWQ or compressed-tensors. No torch."""

from __future__ import annotations

from functools import lru_cache

from appliance.quant import fields
from appliance.quant.errors import UnsupportedFormatError
from appliance.quant.hf.module import Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig

METHODS = ("auto-round", "intel/auto-round", "auto_round", "autoround")
DEFAULT = "auto_round:auto_gptq"
GPTQ_PACKINGS = (DEFAULT, "auto_round:gptq")
# AutoRound's own, gptqmodel's and those named after old kernels store zero points as they are.
GPTQ_V2_PACKINGS = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:tritonv2")
OTHER_PACKINGS = ("auto_round:auto_awq", "auto_round:awq", "auto_round:llm_compressor")
_FLOAT_BITS = 16
# Where a key of extra_config is a pattern, it is not the name of a layer.
_PATTERN_CHARS = frozenset("*\\[(|^$+?")


def packing(config: QuantConfig) -> str:
    """What the tensors are packed as, under its new name where an old release called it a backend."""
    backend = fields.text(config.raw, "backend", "").lower().replace("autoround", "auto_round")
    return config.format or (backend if backend.startswith("auto_round") else DEFAULT)


def check(config: QuantConfig) -> None:
    """Refuses weights that are not integers, and packings that are not known."""
    kind = fields.text(config.raw, "data_type", "int").lower()
    if not kind.startswith("int"):
        raise UnsupportedFormatError(
            f"{config.source}: AutoRound with weights of type {kind!r} is not supported; what works: 'int'"
        )
    known = GPTQ_PACKINGS + GPTQ_V2_PACKINGS + OTHER_PACKINGS
    if packing(config) not in known:
        raise UnsupportedFormatError(
            f"{config.source}: AutoRound's packing {packing(config)!r} is not supported; what works: "
            f"{', '.join(known)}; export the model again in one of these"
        )
    fields.flag(config.raw, "sym", True)
    for entry in (section := fields.section(config.raw, "extra_config")):
        config.overridden(fields.section(section, entry))


def advise(config: QuantConfig, module: str) -> Advice:
    """The layer's own entry, else what holds for all; silent where a pattern might be meant for it."""
    extra = fields.section(config.raw, "extra_config")
    if module not in extra and _has_patterns(config):
        return Advice()
    own = config.overridden(fields.section(extra, module))
    if own.bits is not None and own.bits >= _FLOAT_BITS:
        return Advice(quantized=False)
    return Advice(module in extra or None, own.bits, own.group_size)


@lru_cache(maxsize=4)
def _has_patterns(config: QuantConfig) -> bool:
    return any(_PATTERN_CHARS & set(key) for key in fields.section(config.raw, "extra_config"))


def layout(_module: Module, _config: QuantConfig) -> Layout | None:
    """No tensors of its own."""
    return None
