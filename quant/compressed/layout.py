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
    weight = module.tensors.get("weight")
    if "weight_packed" in module.tensors:
        return _packed(module, args)
    if weight is not None and weight.dtype == "I8":
        module.expect("weight", ("I8",), module.shape)
        return _integers(module, args, INT, args.bits if args else 8, ("weight",))
    if weight is not None and weight.dtype == "F8_E4M3":
        module.expect("weight", ("F8_E4M3",), module.shape)
        group_size, rows, dtype = _scales(module, args)
        scheme = QuantScheme(8, group_size, Mode.CODEBOOK, dtype, Codebook.E4M3)
        return Layout(FP8, scheme, ("weight", "weight_scale", *_activations(module)), rows)
    return None


def _packed(module: Module, args: WeightArgs | None) -> Layout:
    rows, columns = module.shape
    shape = module.tensors["weight_packed"].shape
    words = shape[1] if len(shape) == 2 else 0
    bits = _bits(words, columns, args)
    module.expect(
        "weight_packed", ("I32",), (rows, words if bits else dense_words(columns, args.bits if args else 4))
    )
    module.expect("weight_shape", ("I64", "I32"), (2,))
    if 32 % bits and dense_words(columns, bits) == padded_words(columns, bits):
        raise UnsupportedFormatError(
            f"{columns} codes of {bits} bits in {words} words: whether codes may cross words cannot be told"
        )
    return _integers(module, args, PACKED, bits, ("weight_packed", "weight_shape"))


def _bits(words: int, columns: int, args: WeightArgs | None) -> int:
    """The bits of a code by the length of a row, 0 where none fits; what is claimed counts where two do."""
    if args and words in (dense_words(columns, args.bits), padded_words(columns, args.bits)):
        return args.bits
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
    """How many columns and how many rows share a scale, and what it is computed in."""
    rows, columns = module.shape
    info = module.tensors.get("weight_scale")
    shape = info.shape if info else ()
    block = args.block if args and args.strategy == "block" else None
    if info and shape in ((), (1,), (1, 1)):
        sharing = columns, rows
    elif block and shape == (-(-rows // block[0]), -(-columns // block[1])):
        sharing = min(block[1], columns), block[0]
    elif len(shape) == 2 and shape[0] == rows and shape[1] > 0:
        sharing = _group_size(shape[1], columns, args), 1
    else:
        group_size = min(args.group_size, columns) if args and args.group_size > 0 else columns
        sharing = group_size, block[0] if block else 1
        shape = (-(-rows // sharing[1]), -(-columns // group_size))
    dtype = module.expect("weight_scale", DENSE_DTYPES, shape).dtype
    return *sharing, _DTYPES[dtype]


def _group_size(groups: int, columns: int, args: WeightArgs | None) -> int:
    claimed = min(args.group_size, columns) if args and args.strategy == "group" else 0
    size = claimed if claimed and groups == -(-columns // claimed) else columns // groups
    if size * groups != columns:
        raise CheckpointError(
            f"weight_scale has {groups} groups for {columns} columns{f' in groups of {claimed}' if claimed else ''}, "
            "expected groups of one size"
        )
    return size


def _activations(module: Module) -> tuple[str, ...]:
    return tuple(suffix for suffix in _ACTIVATIONS if suffix in module.tensors)
