"""Products with quantised and with dense matrices as they are compiled."""

from __future__ import annotations

import math

from appliance.kernels.linear import gpu, gpu_dense, gpu_grouped, gpu_split
from benchmarks.gpu_report.compile import ARCHITECTURES, Variant

_ARGUMENTS = {
    "x_ptr": "*{x}:16",
    "codes_ptr": "*i32:16",
    "scales_ptr": "*fp16:16",
    "out_ptr": "*{x}:16",
    "M": "i32",
    "N": "i32:16",
    "K": "i32:16",
    "blocks": "i32",
    "padded_m": "i32:16",
    "padded_n": "i32:16",
    "x_stride": "i32:16",
    "out_stride": "i32:16",
    "splits": "i32",
}
_BIASED = {"biases_ptr": "*fp16:16", "sums_ptr": "*fp32:16"}
_SUPERS = {"scales_ptr": "*i8:16", "super_scales_ptr": "*fp16:16"}
# Bits, group, super-block and what else there is.
_SCHEMES: dict[str, tuple[int, int, int, dict[str, str]]] = {
    "sym4 g128": (4, 128, 0, {}),
    "zp4 g128": (4, 128, 0, {"zeros_ptr": "*u8:16"}),
    "sym4 g32": (4, 32, 0, {}),
    "affine4 g32": (4, 32, 0, _BIASED),
    "kquant4 g32": (
        4,
        32,
        256,
        {**_SUPERS, **_BIASED, "biases_ptr": "*i8:16", "super_biases_ptr": "*fp16:16"},
    ),
    "kquant4 g16": (4, 16, 256, _SUPERS),
    "zp2 g128": (2, 128, 0, {"zeros_ptr": "*u8:16"}),
    "table4 g32": (4, 32, 0, {"table_ptr": "*i32:16"}),
    "sym8 g32": (8, 32, 0, {}),
    "kquant6 g16": (8, 16, 256, _SUPERS),
}
_CHOICES = {"order_ptr": "*i64:16", "offsets_ptr": "*i32:16", "experts": "i32:16", "top_k": "i32"}
# Of a lane, for a weight, with up to 8 rows; of those that a model's layers are mostly made of.
_MOST = {"sym4 g128": 3.0, "zp4 g128": 3.0}

_OF_EXPERTS = ("zp4 g128", "kquant4 g32", "table4 g32")


# While the tensor cores of an RTX 3090 or 4090 multiply 16 x 8 x 16, its schedulers start so many instructions.
_MOST_OF_PRODUCT = 32.0


def _variant(scheme: str, x: str, tile: gpu.Tile) -> Variant:
    bits, group, super_group, arguments = _SCHEMES[scheme]
    splits = {} if tile.splits_inside else {"out_ptr": "*fp32:16"}
    weights, is_bound_by_products = tile.matrix_rows * 512 // bits, tile.x_rows >= 32
    most = _MOST_OF_PRODUCT if is_bound_by_products else math.inf
    name = f"linear {scheme} {x} {tile.x_rows}x{tile.matrix_rows} {tile.warps}w {tile.stages}s"
    return Variant(
        name=name + " inside" * tile.splits_inside,
        kernel=gpu.product_kernel,
        types={name: kind.format(x=x) for name, kind in {**_ARGUMENTS, **arguments, **splits}.items()},
        given=gpu.options(bits, group, super_group, 8, tile, splits=4),
        # 32 lanes do 2048 multiply-adds at once.
        work=weights * tile.x_rows // 64 if is_bound_by_products else weights,
        most=_MOST.get(scheme, most) if tile == gpu.TILES[0] else most,
        architectures=tuple(each for each in ARCHITECTURES if tile in gpu.tiles(each // 10, group)),
    )


def _dense(x: str, tile: gpu.Tile) -> Variant:
    types = {name: _ARGUMENTS[name] for name in ("M", "N", "K", "x_stride", "out_stride", "splits")}
    types |= {"x_ptr": f"*{x}:16", "weight_ptr": f"*{x}:16"}
    types |= {"out_ptr": f"*{x}:16" if tile.splits_inside else "*fp32:16"}
    return Variant(
        name=f"dense {x} {tile.x_rows}x{tile.matrix_rows}",
        kernel=gpu_dense.dense_kernel,
        types=types,
        given=gpu_dense.constants(tile, splits=4) | {"num_warps": tile.warps},
    )


def _grouped(scheme: str, x: str, tile: gpu.Tile) -> Variant:
    bits, group, super_group, arguments = _SCHEMES[scheme]
    types = {name: kind.format(x=x) for name, kind in {**_ARGUMENTS, **arguments, **_CHOICES}.items()}
    return Variant(
        name=f"experts {scheme} {x} {tile.x_rows}x{tile.matrix_rows}",
        kernel=gpu_grouped.grouped_kernel,
        types=types,
        given=gpu_grouped.constants(bits, group, super_group, 8, tile, 4, experts=128)
        | {"num_warps": tile.warps},
        work=tile.matrix_rows * 512 // bits if tile is gpu_grouped.TILES[0] else 0,
    )


def _grouped_dense(x: str, tile: gpu.Tile) -> Variant:
    types = {name: _ARGUMENTS[name] for name in ("N", "K", "x_stride", "out_stride", "splits")} | _CHOICES
    types |= {"x_ptr": f"*{x}:16", "weights_ptr": f"*{x}:16", "out_ptr": f"*{x}:16"}
    return Variant(
        name=f"experts dense {x} {tile.x_rows}x{tile.matrix_rows}",
        kernel=gpu_grouped.grouped_dense_kernel,
        types=types,
        given=gpu_grouped.dense_constants(tile, splits=4, experts=128) | {"num_warps": tile.warps},
    )


def _gather_choices() -> Variant:
    types = {
        "x_ptr": "*fp16:16",
        "inputs_ptr": "*i32:16",
        "out_ptr": "*fp16:16",
        "columns": "i32:16",
    } | _CHOICES
    return Variant(
        name="experts gather",
        kernel=gpu_grouped.gather_kernel,
        types=types | {"x_stride": "i32:16"},
        given={"EXPERTS": 128, "COLUMNS": 1024, "num_warps": 4},
    )


def _merge() -> Variant:
    types = {name: _ARGUMENTS[name] for name in ("M", "N", "splits", "out_stride")}
    types |= {"parts_ptr": "*fp32:16", "bias_ptr": "*fp32:16", "out_ptr": "*fp16:16"}
    return Variant("merge splits", gpu_split.merge_kernel, types, {"COLUMNS": 1024, "num_warps": 4})


_TILES = tuple(dict.fromkeys(gpu.TILES + gpu.TILES_OF_HOPPER))
# All matrices by the tiles of one row and of a prompt, and by all tiles the most usual ones and some that take many
# registers.
LINEAR = [
    *(_variant(scheme, x, _TILES[0]) for scheme in _SCHEMES for x in ("fp16", "bf16")),
    *(_variant(scheme, "bf16", tile) for scheme in _SCHEMES for tile in _TILES if tile.splits_inside),
    *(_variant("zp4 g128", "fp16", tile) for tile in _TILES[1:]),
    *(_variant("kquant4 g32", "bf16", tile) for tile in _TILES[1:] if not tile.splits_inside),
    *(_dense(x, tile) for tile in gpu_dense.TILES for x in ("fp16", "bf16")),
    *(_grouped(scheme, x, gpu_grouped.TILES[0]) for scheme in _OF_EXPERTS for x in ("fp16", "bf16")),
    *(_grouped(scheme, "bf16", tile) for scheme in _OF_EXPERTS for tile in gpu_grouped.TILES[1:]),
    *(_grouped_dense("bf16", tile) for tile in gpu_dense.TILES),
    _gather_choices(),
    _merge(),
]
