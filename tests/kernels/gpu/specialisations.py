"""What kernels are compiled for without a GPU: shapes of real models, with the pools and activations they may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from appliance.kernels.gated_product.gpu import gated_product_kernel
from appliance.kernels.moe.gpu import route_kernel
from appliance.kernels.paged_attention.gpu import (
    SEGMENT,
    decode_kernel,
    merge_kernel,
    prefill_kernel,
)
from appliance.kernels.qkv.gpu import finish_qkv_kernel
from appliance.kernels.rms_norm.gpu import rms_norm_kernel


class Specialisation(NamedTuple):
    """Types as Triton writes them; `:16` promises a multiple of 16."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int


def attention() -> Iterator[Specialisation]:
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
            "TILE": 64 if width <= 128 else 32,
            "STAGES": 2,
            "BLOCK_SIZE": 16,
            "BLOCK_STRIDE": 32 * 2 * 8 * plane,
            "PLANE": plane,
        }
        types = {"q": f"*{q}:16", "pool": f"*{kv}:16", "scales": "*fp32:16" if kv == "i8" else "constexpr"}
        types |= {"tables": "*i32:16", "starts": "*i32:16", "contexts": "*i32:16"}
        types |= {"sums": "*fp32:16", "states": "*fp32:16", "out": f"*{q}:16", "sequences": "i32"}
        types |= {"sinks": "*fp32:16" if sinks else "constexpr", "q_stride": "i32:16", "out_stride": "i32:16"}
        types |= {"blocks": "i32", "segments": "i32", "window": "i32", "scale": "fp32", "softcap": "fp32"}
        for kernel, constexprs, warps in (
            (decode_kernel, attend | {"ROWS": 16}, 4),
            (merge_kernel, shape | {"ROWS": 16, "AT_ONCE": 8, "LIFTED": kv == "i8"}, 1),
            (prefill_kernel, attend | {"ROWS": 64, "DECODE_ROWS": 16}, 4 if width <= 128 else 8),
        ):
            yield _made(f"{kernel.__name__} {name}", kernel, types, constexprs, warps)


def row_kernels() -> Iterator[Specialisation]:
    for dtype in ("fp16", "bf16"):
        row, strides = (
            f"*{dtype}:16",
            {"out_stride": "i32:16", "x_stride": "i32:16", "gate_up_stride": "i32:16"},
        )
        types = {"out": row, "x": row, "weight": "*fp32:16", "width": "i32:16", "eps": "fp32"} | strides
        for width, warps in ((1024, 2), (4096, 8), (8192, 16)):
            yield _made(f"rms_norm {dtype} {width}", rms_norm_kernel, types, {"WIDTH": width}, warps)
        types = {"out": row, "gate_up": row, "width": "i32:16", "alpha": "fp32", "limit": "fp32"} | strides
        for activation in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
            constexprs = {"ACTIVATION": activation, "TILE": 1024}
            yield _made(f"gated_product {dtype} {activation}", gated_product_kernel, types, constexprs, 4)
    types = {"chosen": "*i32:16", "weights": "*fp32:16", "logits": "*fp32:16", "logits_stride": "i32:16"}
    for experts, top_k in ((8, 2), (128, 8)):
        constexprs = {"EXPERTS": experts, "TOP_K": top_k, "SLOTS": top_k, "NORMALISED": True}
        yield _made(f"route {experts}", route_kernel, types | {"experts": "i32"}, constexprs, 1)


def qkv() -> Iterator[Specialisation]:
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
        constexprs |= {"PLANE": plane, "TILE": 4}
        yield _made(f"finish_qkv {name}", finish_qkv_kernel, types, constexprs, 4)


def _made(
    name: str, kernel: Any, types: dict[str, str], constexprs: dict[str, Any], num_warps: int
) -> Specialisation:
    """An argument without a type is a constant, and None where it has no value either."""
    signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
    absent = {arg: None for arg, type in signature.items() if type == "constexpr" and arg not in constexprs}
    return Specialisation(name, kernel, signature, constexprs | absent, num_warps, 2)
