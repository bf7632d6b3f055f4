"""All but products, in the shapes of real models, with the pools and activations that they may have."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.kernels.embedding.gpu import embed_kernel, gather_rows_kernel
from appliance.kernels.gated_product import ACTIVATIONS
from appliance.kernels.gated_product.gpu import gated_product_kernel
from appliance.kernels.moe.gpu import combine_kernel, route_kernel
from appliance.kernels.paged_attention.gpu import (
    AT_ONCE,
    SEGMENT,
    decode_kernel,
    decode_options,
    merge_kernel,
    prefill_kernel,
    prefill_options,
)
from appliance.kernels.qkv.gpu import finish_qkv_kernel
from appliance.kernels.rms_norm.gpu import rms_norm_kernel
from benchmarks.gpu_report.compile import Variant


def attention() -> Iterator[Variant]:
    for name, q, kv, group, head_dim, window, softcap, sinks in (
        ("llama-8b", "fp16", "fp16", 4, 128, False, False, False),
        ("llama-8b bf16", "bf16", "bf16", 4, 128, False, False, False),
        ("llama-8b int8", "fp16", "i8", 4, 128, False, False, False),
        ("llama-8b bf16 int8", "bf16", "i8", 4, 128, False, False, False),
        ("smollm2", "fp16", "fp16", 3, 64, False, False, False),
        ("phi-3-mini", "fp16", "fp16", 1, 96, True, False, False),
        ("gemma-2-9b", "bf16", "bf16", 2, 256, True, True, False),
        ("gemma-2-9b int8", "bf16", "i8", 2, 256, True, True, False),
        ("gpt-oss", "bf16", "bf16", 8, 64, True, False, True),
    ):
        width = 1 << (head_dim - 1).bit_length()
        shape = {"GROUP": group, "SEGMENT": SEGMENT, "HEAD_DIM": head_dim, "WIDTH": width, "WINDOW": window}
        plane = 16 * (head_dim + 4 * (kv == "i8"))
        attend = shape | {
            "SOFTCAP": softcap,
            "BLOCK_SIZE": 16,
            "BLOCK_STRIDE": 32 * 2 * 8 * plane,
            "PLANE": plane,
        }
        types = {"q": f"*{q}:16", "pool": f"*{kv}:16"} | ({"scales": "*fp32:16"} if kv == "i8" else {})
        types |= {"tables": "*i32:16", "starts": "*i32:16", "contexts": "*i32:16"}
        types |= {"sums": "*fp32:16", "states": "*fp32:16", "out": f"*{q}:16", "sequences": "i32"}
        types |= {"q_stride": "i32:16", "out_stride": "i32:16"} | ({"sinks": "*fp32:16"} if sinks else {})
        types |= {
            "blocks": "i32",
            "segments": "i32",
            "kept": "i32",
            "window": "i32",
            "scale": "fp32",
            "softcap": "fp32",
        }
        decode, prefill = decode_options(head_dim, group), prefill_options(head_dim, group, kv == "i8")
        merge = {"ROWS": decode["ROWS"], "AT_ONCE": AT_ONCE, "LIFTED": kv == "i8", "num_warps": 1}
        yield Variant(f"decode {name}", decode_kernel, types, attend | decode)
        yield Variant(f"merge {name}", merge_kernel, types, shape | merge | {"enable_fp_fusion": False})
        yield Variant(f"prefill {name}", prefill_kernel, types, attend | prefill)


def row_kernels() -> Iterator[Variant]:
    for dtype in ("fp16", "bf16"):
        row, strides = (
            f"*{dtype}:16",
            {"out_stride": "i32:16", "x_stride": "i32:16", "gate_up_stride": "i32:16"},
        )
        types = {"out": row, "x": row, "weight": "*fp32:16", "width": "i32:16", "eps": "fp32"} | strides
        for width, warps in ((1024, 2), (4096, 8), (8192, 16)):
            yield Variant(
                f"rms_norm {dtype} {width}", rms_norm_kernel, types, {"WIDTH": width, "num_warps": warps}
            )
        types = {"out": row, "gate_up": row, "width": "i32:16", "alpha": "fp32", "limit": "fp32"} | strides
        for activation in ACTIVATIONS:
            constexprs = {"ACTIVATION": activation, "TILE": 1024, "num_warps": 4}
            yield Variant(f"gated_product {dtype} {activation}", gated_product_kernel, types, constexprs)
    types = {"chosen": "*i32:16", "weights": "*fp32:16", "logits": "*fp32:16", "logits_stride": "i32:16"}
    for experts, top_k in ((8, 2), (128, 8)):
        constexprs = {"EXPERTS": experts, "TOP_K": top_k, "SLOTS": top_k, "NORMALISED": True, "num_warps": 1}
        yield Variant(f"route {experts}", route_kernel, types | {"experts": "i32"}, constexprs)
    types = {"out": "*bf16:16", "parts": "*bf16:16", "weights": "*fp32:16", "width": "i32:16"}
    types |= {"out_stride": "i32:16", "parts_stride": "i32:16"}
    yield Variant("combine", combine_kernel, types, {"TOP_K": 8, "TILE": 1024, "num_warps": 4})


def embedding() -> Iterator[Variant]:
    types = {"out_ptr": "*bf16:16", "tokens_ptr": "*i64:16", "out_stride": "i32:16", "factor": "fp32"}
    options = {"TILE": 512, "num_warps": 4}
    dense = {"table_ptr": "*bf16:16", "width": "i32:16"}
    yield Variant("embed dense", gather_rows_kernel, types | dense, options)
    types |= {"codes_ptr": "*i32:16", "scales_ptr": "*fp16:16", "columns": "i32:16", "blocks": "i32"}
    types |= {"padded_n": "i32:16"}
    supers = {"scales_ptr": "*i8:16", "super_scales_ptr": "*fp16:16"}
    for name, bits, group, super_group, others in (
        ("sym", 4, 128, 0, {}),
        ("zero points", 4, 128, 0, {"zeros_ptr": "*u8:16"}),
        ("q4_k", 4, 32, 256, supers | {"biases_ptr": "*i8:16", "super_biases_ptr": "*fp16:16"}),
        ("q6_k", 8, 16, 256, supers),
        ("iq4_nl", 4, 32, 0, {"table_ptr": "*u8:16"}),
    ):
        constexprs = {"BITS": bits, "GROUP": group, "SUPER": super_group, "ZERO": 1 << (bits - 1)}
        given = constexprs | options | {"enable_fp_fusion": False}
        yield Variant(f"embed {name}", embed_kernel, types | others, given)


def qkv() -> Iterator[Variant]:
    for name, dtype, kv, heads, kv_heads, head_dim, half, norm in (
        ("llama-8b", "fp16", "fp16", 32, 8, 128, 64, None),
        ("llama-8b int8", "bf16", "i8", 32, 8, 128, 64, None),
        ("qwen-3", "bf16", "bf16", 32, 8, 128, 64, "heads"),
        ("olmo-2", "bf16", "bf16", 32, 32, 128, 64, "whole"),
        ("phi-3-mini", "fp16", "fp16", 32, 32, 96, 48, None),
        ("gemma-3 int8", "bf16", "i8", 8, 4, 256, 128, "heads"),
    ):
        plane = 16 * (head_dim + 4 * (kv == "i8"))
        constexprs = {"NORM": norm, "HALF": half, "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
        constexprs |= {"WIDTH": 1 << (head_dim - 1).bit_length(), "BLOCK_STRIDE": 64 * kv_heads * plane}
        types = {"q": f"*{dtype}:16", "qkv": f"*{dtype}:16", "pool": f"*{kv}:16", "eps": "fp32"}
        types |= dict.fromkeys(("positions", "blocks", "offsets"), "*i32:16")
        types |= {"cos": "*fp32:16", "sin": "*fp32:16", "qkv_stride": "i32:16"}
        if norm:
            types |= {"q_weight": "*fp32:16", "k_weight": "*fp32:16"}
        if kv == "i8":
            types |= {"scales": "*fp32:16"}
        constexprs |= {"PLANE": plane, "TILE": 4, "num_warps": 4}
        yield Variant(f"finish_qkv {name}", finish_qkv_kernel, types, constexprs)


STEPS = [*attention(), *row_kernels(), *embedding(), *qkv()]
