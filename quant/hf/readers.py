"""Linear layers of every format in safetensors into the canonical form."""

from __future__ import annotations

from collections.abc import Callable

import torch

from appliance.quant.awq import layout as awq
from appliance.quant.awq import read as read_awq
from appliance.quant.compressed import layout as compressed
from appliance.quant.compressed import read as compressed_read
from appliance.quant.gptq import layout as gptq_layout
from appliance.quant.gptq import read as gptq
from appliance.quant.hf import dense
from appliance.quant.hf.file import TensorInfo, read_bytes
from appliance.quant.hf.module import Layout, Module
from appliance.quant.mxfp4 import layout as mxfp4
from appliance.quant.mxfp4 import read as mxfp4_read
from appliance.quant.tensor import DenseTensor, Weight

Fetch = Callable[[str], torch.Tensor]
"""The tensor of a suffix, in memory of its own."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}


def _dense(_module: Module, _layout: Layout, fetch: Fetch) -> DenseTensor:
    return DenseTensor(fetch("weight"))


READERS: dict[str, Callable[[Module, Layout, Fetch], Weight]] = {
    dense.FORMAT: _dense,
    **dict.fromkeys(gptq_layout.FORMATS, gptq.read),
    awq.GEMM: read_awq.read_gemm,
    awq.GEMV: read_awq.read_gemv,
    awq.GEMV_FAST: read_awq.read_gemv_fast,
    awq.MARLIN: read_awq.read_marlin,
    compressed.PACKED: compressed_read.read_packed,
    compressed.INT: compressed_read.read_int,
    compressed.FP8: compressed_read.read_fp8,
    mxfp4.FORMAT: mxfp4_read.read,
}
"""By `Layout.format`."""


def read_module(module: Module, layout: Layout) -> Weight:
    """The weight of a layer.

    Raises:
        CheckpointError: its data contradict themselves, or a file was cut short.
        OSError: a file cannot be read.
    """
    return READERS[layout.format](module, layout, lambda suffix: read_tensor(module.tensors[suffix]))


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """A tensor, contiguous."""
    stored = torch.from_numpy(read_bytes(info)).view(_DTYPES[info.dtype]).view(info.stored_shape)
    rows = stored.t() if info.transposed else stored
    return rows[info.start :: info.step].contiguous()
