"""Which of AWQ's orders a layer is in, by its tensors. No torch.

Shapes follow AutoAWQ (awq/modules/linear), for a weight of N outputs and K inputs in G groups:

| | qweight | qzeros | scales |
|-|-|-|-|
| gemm | int32 [K, N/8] | int32 [G, N/8] | [G, N] |
| gemv | int32 [N, K/8] | int32 [N, W] | [N, 8W] |
| gemv_fast | int16 [N/4, K] | fp16 [8W, N] | [8W, N] |
| marlin | int32 [K/16, 2N] | – | [G, N] |
"""

from __future__ import annotations

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, located
from appliance.quant.hf.module import Advice, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.scheme import Mode, QuantScheme

METHOD = "awq"
GEMM, GEMV, GEMV_FAST, MARLIN = "awq-gemm", "awq-gemv", "awq-gemv-fast", "awq-marlin"
BITS = 4
# What gemv's padding is defined for; other sizes are whole rows.
_PADDED_GROUPS = (32, 64, 128)
_SCALES = ("F16", "BF16")
# Any other version, e.g. "exllama", is a kernel that reads gemm's files.
_VERSIONS = {"gemv": GEMV, "gemv_fast": GEMV_FAST, "llm-awq": GEMV_FAST, "marlin": MARLIN}


def check(config: QuantConfig) -> None:
    """Raises CheckpointError for a list of skipped layers that is none; every other claim is left to the tensors."""
    _skipped(config)


def advise(config: QuantConfig, module: str) -> Advice:
    """Only the decoder's layers are quantised, bar those that the configuration skips."""
    if any(rule in module + "." for rule in _skipped(config)):
        return Advice(quantized=False)
    return Advice(True if ".layers." in f".{module}" else None, config.bits, config.group_size)


def _skipped(config: QuantConfig) -> list[str]:
    """Parts of names: "visual", "mlp.gate.", "model.layers.0."."""
    key = "modules_to_not_convert"
    return [] if config.raw.get(key) is None else [rule for rule in fields.strings(config.raw, key) if rule]


def layout(module: Module, config: QuantConfig) -> Layout | None:
    """Raises UnsupportedFormatError for other widths than four bits, CheckpointError for a broken layer."""
    variant = _variant(module)
    if variant == GEMM and "round" in config.method and not _announced(config):
        # AutoRound's own packing has neither g_idx nor a shape that reshaping would not make gemm's.
        return None
    if variant is None:
        if not _announced(config) or not _quantized_otherwise(module):
            return None
        if config.bits not in (None, BITS):
            raise UnsupportedFormatError(
                f"{config.source}: AWQ with {config.bits} bits is not supported; what works: {BITS} bits"
            )
        # Tensors that fit nothing are measured against what was announced.
        variant = _VERSIONS.get(config.format, GEMM)
    return _LAYOUTS[variant](module, config)


def _announced(config: QuantConfig) -> bool:
    """AutoRound announces itself, and AWQ as what it packed for."""
    return config.method == METHOD or "awq" in config.format


def _quantized_otherwise(module: Module) -> bool:
    """Whether the layer is quantised, and not with an order of inputs, which GPTQ alone has."""
    return "g_idx" not in module.tensors and not {"qweight", "qzeros", "scales"}.isdisjoint(module.tensors)


def _variant(module: Module) -> str | None:
    """The order whose qweight this is, whatever its other tensors are; None where it is nobody's.

    No shape of GPTQ's qweight, int32 [K * bits / 32, N], is gemm's or marlin's. gemv's is GPTQ's of 4 bits where
    N = K / 8, gemm's where N = K, and marlin's where N = K / 16. Then scales tell: gemv alone has N rows of them, as
    many as the others have groups, which would be of 8, 1 and 16 weights.
    """
    rows, columns = module.shape
    info = module.tensors.get("qweight")
    if info is None or "g_idx" in module.tensors:
        return None
    scales = module.tensors.get("scales")
    by_rows = scales is not None and scales.shape[:1] == (rows,)
    if info.dtype == "I16":
        return GEMV_FAST if info.shape == (rows / 4, columns) else None
    if info.dtype != "I32":
        return None
    if info.shape == (rows, columns / 8) and by_rows:
        return GEMV
    if info.shape == (columns, rows / 8):
        return GEMM
    return MARLIN if info.shape == (columns / 16, 2 * rows) else None


def _gemm(module: Module, config: QuantConfig) -> Layout:
    rows, columns = module.shape
    _expect_multiples(module, GEMM, outputs=8)
    module.expect("qweight", ("I32",), (columns, rows // 8))
    size = _group_size(module, config)
    groups = columns // size
    module.expect("qzeros", ("I32",), (groups, rows // 8))
    module.expect("scales", _SCALES, (groups, rows))
    return _layout(module, GEMM, size, Mode.ZP, ("qweight", "qzeros", "scales"))


def _gemv(module: Module, config: QuantConfig) -> Layout:
    rows, columns = module.shape
    _expect_multiples(module, GEMV, inputs=8)
    module.expect("qweight", ("I32",), (rows, columns // 8))
    size, width = _padded(module, config, axis=1)
    module.expect("qzeros", ("I32",), (rows, width))
    module.expect("scales", _SCALES, (rows, 8 * width))
    return _layout(module, GEMV, size, Mode.ZP, ("qweight", "qzeros", "scales"))


def _gemv_fast(module: Module, config: QuantConfig) -> Layout:
    rows, columns = module.shape
    _expect_multiples(module, GEMV_FAST, outputs=4, inputs=64)
    module.expect("qweight", ("I16",), (rows // 4, columns))
    size, width = _padded(module, config, axis=0)
    # The name that the research code and early AutoAWQ gave them.
    zeros = "scaled_zeros" if "scaled_zeros" in module.tensors else "qzeros"
    scales = module.expect("scales", _SCALES, (8 * width, rows))
    module.expect(zeros, (scales.dtype,), (8 * width, rows))
    return _layout(module, GEMV_FAST, size, Mode.ZP, ("qweight", zeros, "scales"))


def _marlin(module: Module, config: QuantConfig) -> Layout:
    rows, columns = module.shape
    _expect_multiples(module, MARLIN, outputs=64, inputs=16)
    module.expect("qweight", ("I32",), (columns // 16, 2 * rows))
    # Without zero points nothing else confirms the number of groups: a cut tensor would read as larger groups.
    claims = _announced(config) and config.group_size is not None
    size = _claimed_size(columns, config) if claims else _group_size(module, config)
    module.expect("scales", _SCALES, (columns // size, rows))
    return _layout(module, MARLIN, size, Mode.SYM, ("qweight", "scales"))


_LAYOUTS = {GEMM: _gemm, GEMV: _gemv, GEMV_FAST: _gemv_fast, MARLIN: _marlin}


def _layout(module: Module, variant: str, group_size: int, mode: Mode, uses: tuple[str, ...]) -> Layout:
    with located(module.name):
        # The tools compute in float16 whatever the scales are stored in.
        return Layout(variant, QuantScheme(BITS, group_size, mode, "float16"), uses)


def _expect_multiples(module: Module, variant: str, outputs: int = 1, inputs: int = 1) -> None:
    rows, columns = module.shape
    if rows % outputs or columns % inputs:
        raise CheckpointError(
            f"{module.name} has {rows} outputs and {columns} inputs; {variant} holds only multiples of {outputs} "
            f"outputs and {inputs} inputs"
        )


def _claimed_size(columns: int, config: QuantConfig) -> int:
    """The size of the groups that the configuration asks for; a whole row where it asks for none that fits."""
    claimed = config.group_size
    if claimed is None or not 0 < claimed < columns or columns % claimed:
        return columns
    return claimed


def _group_size(module: Module, config: QuantConfig) -> int:
    """By the rows of scales, or as claimed where these make no equal groups."""
    rows, columns = module.shape
    info = module.tensors.get("scales")
    if info is None or len(info.shape) != 2 or info.shape[1] != rows:
        return _claimed_size(columns, config)
    groups = info.shape[0]
    return columns // groups if groups and columns % groups == 0 else _claimed_size(columns, config)


def _padded(module: Module, config: QuantConfig, axis: int) -> tuple[int, int]:
    """Size of the groups and W, where 8W scales lie along `axis` with zeros at the end.

    Several sizes share a W: the one that is claimed is believed if it fits, and the reader checks that just the
    scales beyond its groups are zero.
    """
    columns = module.shape[1]
    claimed = _claimed_size(columns, config)
    info = module.tensors.get("scales")
    if info is not None and len(info.shape) == 2:
        for size in (claimed, *_PADDED_GROUPS, columns):
            if columns % size == 0 and 8 * _width(columns, size) == info.shape[axis]:
                return size, _width(columns, size)
    return claimed, _width(columns, claimed)


def _width(columns: int, group_size: int) -> int:
    """Words of zero points to a row (AutoAWQ, calculate_zeros_width)."""
    multiple = 1 if group_size >= 128 else 2 if group_size >= 64 else 4
    words = -(-(columns // group_size) // 8)
    return -(-words // multiple) * multiple
