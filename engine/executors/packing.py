"""A model's matrices in the native library's layout."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.linear.cpu import PackedMatrix
from appliance.quant.packed import pack


def pack_matrices(
    weights: ModelWeights, names: Sequence[str], threads: int, progress: Progress
) -> dict[str, PackedMatrix]:
    """Each of the named weights, read and packed; as many at once as there are threads."""
    total = sum(weights.elements((name,)) for name in names)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads)
    packed: dict[str, PackedMatrix] = {}
    done = 0
    try:
        for name, matrix in zip(names, pool.map(lambda name: pack(weights.read(name), _memory), names), strict=True):
            packed[name] = matrix
            done += weights.elements((name,))
            progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
    return packed


def _memory(nbytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, nbytes)
    if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
