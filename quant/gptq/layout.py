"""GPTQ: what configurations claim, and how a layer's tensors must look. No torch.

qweight int32 [ceil(K * bits / 32), N], codes along the inputs, the least significant bits first; qzeros int32
[G, ceil(N * bits / 32)], likewise along the outputs; scales [G, N]; g_idx int32 [K], the group of each input, without
which groups are consecutive. As AutoGPTQ and gptqmodel write them.
"""

from __future__ import annotations

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.hf import autoround
from appliance.quant.hf.module import Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.patterns import limit_patterns, matches_start
from appliance.quant.scheme import MIN_GROUP_SIZE, Mode, QuantScheme

METHODS = ("gptq",)
BITS = (2, 3, 4, 8)
SCALE_DTYPES = ("F16", "BF16", "F32")
INDEX_DTYPES = ("I32", "I64")

V1 = "gptq"
"""Zero points are stored less one, each in its own bits."""
V1_WORDS = "gptq-gptqmodel"
"""As V1, but one was subtracted from all zero points of a word at once, so that borrows ran on."""
V2 = "gptq-v2"
"""Zero points are stored as they are."""
UNKNOWN = "gptq-v1-or-v2"
"""Two configurations disagree: only zero points that are all in the middle can be told."""
FORMATS = (V1, V1_WORDS, V2, UNKNOWN)

_VERSIONS = {"": V1, "gptq": V1, "gptq_v2": V2}
_FORMAT_KEYS = ("checkpoint_format", "format")
_SKIP, _APPLY = "-:", "+:"


def check(config: QuantConfig) -> None:
    """Refuses other tools' variants of GPTQ, and claims that cannot be."""
    raw = config.raw
    stated = {fields.text(raw, key).lower() for key in _FORMAT_KEYS if raw.get(key) is not None} or {""}
    if fields.flag(raw, "is_marlin_format", False):
        stated.add("marlin")
    unknown = sorted((stated | {config.format}) - _VERSIONS.keys())
    if unknown:
        raise UnsupportedFormatError(
            f"{config.source}: GPTQ in checkpoint format {unknown[0]!r} is not supported; what works: 'gptq' and "
            "'gptq_v2'; quantise the model again to one of these"
        )
    if len(stated) > 1:
        raise CheckpointError(
            f"{config.source}: its checkpoint format is both {' and '.join(map(repr, sorted(stated)))}, whose zero "
            "points differ by one; remove the wrong one"
        )
    words = fields.text(raw, "pack_dtype", "int32")
    if words != "int32":
        raise UnsupportedFormatError(
            f"{config.source}: GPTQ packed into {words} is not supported; what works: int32; quantise the model again"
        )
    symmetric = _claims_symmetry(config)
    if config.disputed and not symmetric:
        raise CheckpointError(
            f"{config.source} says that the checkpoint format is {config.format!r}, {config.disputed} says another, "
            "and zero points of the two differ by one; correct the wrong one"
        )
    _by_gptqmodel(config)
    for key in ("lm_head", "desc_act"):
        fields.flag(raw, key, False)
    _check_numbers(config)
    rules = fields.section(raw, "dynamic")
    with located(config.source):
        limit_patterns(rules)
    for pattern in rules:
        _check_numbers(config.overridden(fields.section(rules, pattern)))


def _check_numbers(config: QuantConfig) -> None:
    if config.bits is not None and config.bits not in BITS:
        raise UnsupportedFormatError(
            f"{config.source}: GPTQ with {config.bits} bits is not supported; what works: {', '.join(map(str, BITS))}"
        )
    size = config.group_size
    if size is not None and size != -1 and size < MIN_GROUP_SIZE:
        raise UnsupportedFormatError(
            f"{config.source}: GPTQ in groups of {size} is not supported; what works: {MIN_GROUP_SIZE} or more, or -1 "
            "for whole rows"
        )


def _claims_symmetry(config: QuantConfig) -> bool:
    return fields.flag(config.raw, "sym", not fields.flag(config.raw, "zero_point", False))


def advise(config: QuantConfig, module: str) -> Advice:
    """The first dynamic rule that the name starts with, else what holds for all.

    Silent from a rule on that cannot be tried: it might have been the one.
    """
    if module.endswith("lm_head") and config.raw.get("lm_head") is False:
        return Advice(quantized=False)
    rules = fields.section(config.raw, "dynamic")
    for pattern in rules:
        matches = matches_start(pattern.removeprefix(_SKIP).removeprefix(_APPLY), module)
        if matches is None:
            return Advice()
        if matches and pattern.startswith(_SKIP):
            return Advice(quantized=False)
        if matches:
            config = config.overridden(fields.section(rules, pattern))
            break
    return Advice(None, config.bits, config.group_size)


def layout(module: Module, config: QuantConfig) -> Layout | None:
    """None where the tensors are not GPTQ's, or the weight is dense.

    Raises:
        CheckpointError: a tensor is missing or of a wrong shape, or the configuration does not say how zero points
            are stored.
    """
    if "weight" in module.tensors or not module.tensors.keys() & {"qweight", "qzeros", "g_idx"}:
        return None
    announced = config.method in METHODS or _is_autoround_gptq(config)
    fitting = _fitting_bits(module)
    if not announced:
        if fitting and _has_scales(module):
            raise CheckpointError(
                f"{module.file}: the tensors of {module.name} are GPTQ's, but {config.source or 'the configuration'} "
                f"announces {config.method or 'nothing'!r}, which does not tell how zero points are stored; set "
                "quant_method to 'gptq' and checkpoint_format to 'gptq' or 'gptq_v2'"
            )
        return None
    rows, columns = module.shape
    advice = (advise if config.method in METHODS else autoround.advise)(config, module.name)
    bits = fitting[0] if len(fitting) == 1 else advice.bits or 4
    module.expect("qweight", ("I32",), (-(-columns * bits // 32), rows))
    group_size = _group_size(module, advice.group_size)
    groups = -(-columns // group_size)
    scales = module.expect("scales", SCALE_DTYPES, (groups, rows))
    mode = Mode.SYM if _claims_symmetry(config) else Mode.ZP
    with located(f"{scales.file}: tensor {scales.name!r}"):
        # What a weight is shows in what a layer makes of a unit vector: a sum of products, which is never -0.
        scheme = QuantScheme(bits, group_size, mode, "float16", signed_zeros=False)
    module.expect("qzeros", ("I32",), (groups, -(-rows * bits // 32)))
    uses: tuple[str, ...] = ("qweight", "qzeros", "scales")
    # Without it a layer in act-order looks like any other; only AutoRound never writes it.
    ordered = config.method in METHODS and fields.flag(config.raw, "desc_act", True)
    if ordered or "g_idx" in module.tensors:
        module.expect("g_idx", INDEX_DTYPES, (columns,))
        uses += ("g_idx",)
    return Layout(_version(config), scheme, uses)


def _is_autoround_gptq(config: QuantConfig) -> bool:
    gptq = autoround.GPTQ_PACKINGS + autoround.GPTQ_V2_PACKINGS
    return config.method in autoround.METHODS and autoround.packing(config) in gptq


def _version(config: QuantConfig) -> str:
    if config.method not in METHODS:
        return V1 if autoround.packing(config) in autoround.GPTQ_PACKINGS else V2
    if config.disputed:
        return UNKNOWN
    version = _VERSIONS[config.format]
    return V1_WORDS if version == V1 and _by_gptqmodel(config) else version


def _by_gptqmodel(config: QuantConfig) -> bool:
    """Whether gptqmodel wrote it, or AutoGPTQ's last commits, which it grew out of: releases state no format."""
    made_by = fields.section(config.raw, "meta").get("quantizer")
    makers = made_by if isinstance(made_by, list) else [made_by]
    named = any(isinstance(maker, str) and maker.lower().startswith("gptqmodel") for maker in makers)
    return named or config.raw.get("checkpoint_format") is not None


def _fitting_bits(module: Module) -> list[int]:
    """The widths of codes that the shape of qweight allows; one, where there are 32 inputs or more."""
    info = module.tensors.get("qweight")
    if info is None or info.dtype != "I32":
        return []
    rows, columns = module.shape
    return [bits for bits in BITS if info.shape == (-(-columns * bits // 32), rows)]


def _has_scales(module: Module) -> bool:
    """Whether there are scales shaped as GPTQ's, which tells its tensors from AWQ's where N = K / 8."""
    rows, columns = module.shape
    info = module.tensors.get("scales")
    return (
        info is not None
        and len(info.shape) == 2
        and info.shape[1] == rows
        and info.shape[0] * MIN_GROUP_SIZE <= columns
    )


def _group_size(module: Module, claimed: int | None) -> int:
    """How many inputs share a scale; claims help where the number of groups leaves it open.

    Where that number fits nothing, what was claimed.
    """
    columns = module.shape[1]
    info = module.tensors.get("scales")
    groups = info.shape[0] if info is not None and info.shape else 0
    if claimed is not None and (claimed < 0 or claimed > columns):
        claimed = columns
    if claimed and -(-columns // claimed) == groups:
        if columns % claimed and columns % groups == 0 and "g_idx" not in module.tensors:
            raise CheckpointError(
                f"{module.file}: {groups} groups of {columns} inputs in {module.name} are of {columns // groups}, or "
                f"of {claimed} as the configuration says; set its group_size to the right one"
            )
        return claimed
    if groups and columns % groups == 0:
        return columns // groups
    return claimed or columns
