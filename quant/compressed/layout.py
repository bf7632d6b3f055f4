"""How compressed-tensors stores a linear layer, from headers. No torch.

- packed: `weight_packed` int32 [N, words], codes along K, `weight_shape` [2]
- plain: `weight` int8 or fp8 (E4M3) [N, K]

Either has `weight_scale`: [1] of the tensor, [N, 1] of rows, [N, G] of groups, or [N / rows, K / columns] of blocks;
integers may have a `weight_zero_point` of that shape in int8, or in int32 packed along N, and a `weight_g_idx` [K] of
the groups that columns are in. Scales of activations are left alone.
"""

from __future__ import annotations

from appliance.quant.compressed.config import WeightArgs, weight_args
from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.hf.module import DENSE_DTYPES, Layout, Module
from appliance.quant.hf.quant_config import QuantConfig
from appliance.quant.scheme import BITS, Codebook, Mode, QuantScheme

PACKED = "compressed-tensors-pack"
INT = "compressed-tensors-int"
FP8 = "compressed-tensors-fp8"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


def dense_words(count: int, bits: int) -> int:
    """int32 words of a row of codes in a stream of bits."""
    return -(-count * bits // 32)


def padded_words(count: int, bits: int) -> int:
    """int32 words of a row of codes of which none crosses a word, as older releases pack."""
    return -(-count // (32 // bits))


def is_dense(module: Module, bits: int) -> bool:
    """Whether a packed layer's codes are a stream of bits; its zero points are then, too."""
    return module.tensors["weight_packed"].shape[1] == dense_words(module.shape[1], bits)


def layout(module: Module, config: QuantConfig) -> Layout | None:
    args = weight_args(config, module.name)
    if "weight_packed" in module.tensors:
        return _packed(module, args)
    weight = module.tensors.get("weight")
    if weight is None or weight.dtype not in ("I8", "F8_E4M3"):
        return None
    dtype = weight.dtype if args is None else "F8_E4M3" if args.is_float else "I8"
    module.expect("weight", (dtype,), module.shape)
    if dtype == "I8":
        return _integers(module, args, INT, args.bits if args else 8, ("weight",))
    group_size, rows, scale_dtype = _scales(module, args)
    scheme = QuantScheme(8, group_size, Mode.CODEBOOK, scale_dtype, Codebook.E4M3)
    return Layout(FP8, scheme, ("weight", "weight_scale", *_activations(module)), rows)


def _packed(module: Module, args: WeightArgs | None) -> Layout:
    rows, columns = module.shape
    shape = module.tensors["weight_packed"].shape
    words = shape[1] if len(shape) == 2 else 0
    bits = _bits(module, words, args)
    claimed = dense_words(columns, args.bits if args else 4)
    module.expect("weight_packed", ("I32",), (rows, words if bits else claimed))
    module.expect("weight_shape", ("I64", "I32"), (2,))
    if 32 % bits and dense_words(columns, bits) == padded_words(columns, bits):
        raise UnsupportedFormatError(
            f"{columns} codes of {bits} bits in {words} words: whether codes may cross words cannot be told"
        )
    return _integers(module, args, PACKED, bits, ("weight_packed", "weight_shape"))


def _bits(module: Module, words: int, args: WeightArgs | None) -> int:
    """The bits of a code by the length of a row; 0 where none fits, or nothing but the length contradicts a claim."""
    columns = module.shape[1]
    if args and words in (dense_words(columns, args.bits), padded_words(columns, args.bits)):
        return args.bits
    zeros = module.tensors.get("weight_zero_point")
    if args and (zeros is None or zeros.dtype != "I32"):
        return 0
    for length in (dense_words, padded_words):
        for bits in BITS:
            if words == length(columns, bits):
                return bits
    return 0


def _integers(
    module: Module, args: WeightArgs | None, format_: str, bits: int, uses: tuple[str, ...]
) -> Layout:
    group_size, rows_per_scale, dtype = _scales(module, args)
    uses += ("weight_scale",)
    has_zeros = "weight_zero_point" in module.tensors or (args is not None and not args.symmetric)
    if has_zeros:
        _expect_zeros(module, format_, bits)
        uses += ("weight_zero_point",)
    if "weight_g_idx" in module.tensors or (args is not None and args.act_order):
        module.expect("weight_g_idx", ("I32", "I64"), (module.shape[1],))
        uses += ("weight_g_idx",)
    scheme = QuantScheme(bits, group_size, Mode.ZP if has_zeros else Mode.SYM, dtype)
    return Layout(format_, scheme, (*uses, *_activations(module)), rows_per_scale)


def _expect_zeros(module: Module, format_: str, bits: int) -> None:
    """In int8 as the scales are, or packed as the weights are."""
    scales = module.tensors["weight_scale"].shape
    info = module.tensors.get("weight_zero_point")
    if format_ == INT or (info is not None and info.dtype == "I8"):
        module.expect("weight_zero_point", ("I8",), scales)
        return
    words = (dense_words if is_dense(module, bits) else padded_words)(module.shape[0], bits)
    module.expect("weight_zero_point", ("I32",), (words, scales[-1] if scales else 1))


def _scales(module: Module, args: WeightArgs | None) -> tuple[int, int, str]:
    """How many columns and how many rows share a scale, and what it is computed in.

    A claim is believed unless the scales' shape contradicts it and zero points bear them out.
    """
    rows, columns = module.shape
    info = module.tensors.get("weight_scale")
    shape = info.shape if info else ()
    width, height = _claimed_sharing(module.shape, args) if args else (columns, 1)
    is_open = args is None or "weight_zero_point" in module.tensors
    if is_open and shape != (-(-rows // height), -(-columns // width)):
        if info and shape in ((), (1,), (1, 1)):
            width, height = columns, rows
        elif len(shape) == 2 and shape[0] == rows and shape[1] and columns % shape[1] == 0:
            width, height = columns // shape[1], 1
    expected = -(-rows // height), -(-columns // width)
    accepted = shape if info and expected == (1, 1) and shape in ((), (1,)) else expected
    dtype = module.expect("weight_scale", DENSE_DTYPES, accepted).dtype
    if height == 1 and columns % width:
        raise CheckpointError(f"groups of {width} do not divide the {columns} columns of {module.name}")
    return width, height, _DTYPES[dtype]


def _claimed_sharing(shape: tuple[int, int], args: WeightArgs) -> tuple[int, int]:
    """Columns and rows that share a scale."""
    rows, columns = shape
    width = columns if args.group_size == -1 else min(args.group_size, columns)
    return width, {"tensor": rows, "block": args.block[0]}.get(args.strategy, 1)


def _activations(module: Module) -> tuple[str, ...]:
    return tuple(suffix for suffix in _ACTIVATIONS if suffix in module.tensors)
