"""AWQ tensors packed a code at a time, as the layouts are described, and files that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from appliance.quant.hf.file import read_header
from appliance.quant.hf.module import Module

Tensors = dict[str, np.ndarray]


def pack_gemm(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Tensors:
    """Words along the outputs, whose nibbles hold the even ones first."""
    return {"qweight": _interleaved(codes.T), "qzeros": _interleaved(zeros.T), "scales": scales.T}


def pack_gemv(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, width: int) -> Tensors:
    """Words along the inputs in their order; `width` words of zero points to an output."""
    padding = ((0, 0), (0, 8 * width - zeros.shape[1]))
    words = [_words(np.pad(zeros, padding)), np.pad(scales, padding)]
    return {"qweight": _words(codes), "qzeros": words[0], "scales": words[1]}


def pack_gemv_fast(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, width: int) -> Tensors:
    rows, columns = codes.shape
    qweight = np.zeros((rows // 4, columns), dtype=np.uint16)
    for n in range(rows):
        for k in range(columns):
            block, half, a, b, c = k // 64, k % 64 // 32, k % 32 // 8, k % 8 // 2, k % 2
            place = n % 4 * 64 + half * 32 + b * 8 + c * 4 + a
            qweight[n // 4, block * 64 + place // 4] |= codes[n, k].astype(np.uint16) << place % 4 * 4
    padding = ((0, 8 * width - zeros.shape[1]), (0, 0))
    scaled = -(scales.astype(np.float32) * zeros).astype(np.float16)
    return {
        "qweight": qweight.view(np.int16),
        "qzeros": np.pad(scaled.T, padding),
        "scales": np.pad(scales.T, padding),
    }


def pack_marlin(codes: np.ndarray, scales: np.ndarray) -> Tensors:
    """Symmetric: the zero point of every group is 8."""
    rows, columns = codes.shape
    qweight = np.zeros((columns // 16, 2 * rows), dtype=np.uint32)
    for tile_k in range(columns // 16):
        for tile_n in range(rows // 64):
            for thread in range(32):
                row, column = thread % 4 * 2, thread // 4
                inputs = [row, row + 1, row + 8, row + 9]
                corners = [(k, column) for k in inputs] + [(k, column + 8) for k in inputs]
                for block in range(4):
                    word = 0
                    for nibble, corner in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                        k, n = corners[corner]
                        code = codes[tile_n * 64 + block * 16 + n, tile_k * 16 + k]
                        word |= int(code) << 4 * nibble
                    qweight[tile_k, tile_n * 128 + thread * 4 + block] = word
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    whole = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = whole if scales.shape[1] == 1 else grouped
    stored = scales.T.reshape(-1, len(order))[:, order].reshape(-1, rows)
    return {"qweight": qweight.view(np.int32), "scales": stored}


def write_module(
    path: Path, tensors: Mapping[str, np.ndarray | torch.Tensor], shape: tuple[int, int]
) -> Module:
    """A file with the tensors of one layer, "layer"."""
    named = {f"layer.{suffix}": torch.as_tensor(tensor) for suffix, tensor in tensors.items()}
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}, path
    )
    infos = {name.removeprefix("layer."): info for name, info in read_header(path).items()}
    return Module("layer", shape, infos)


def _interleaved(values: np.ndarray) -> np.ndarray:
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for column in range(words.shape[1]):
        for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, column] |= values[:, 8 * column + place].astype(np.uint32) << 4 * nibble
    return words.view(np.int32)


def _words(values: np.ndarray) -> np.ndarray:
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for column in range(values.shape[1]):
        words[:, column // 8] |= values[:, column].astype(np.uint32) << column % 8 * 4
    return words.view(np.int32)
