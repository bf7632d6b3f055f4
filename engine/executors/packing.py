"""A model's matrices in the native library's layout, kept beside the model for the next load."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from appliance.engine.packed_files import model_files
from appliance.engine.weight_cache import WeightCache
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.linear.cpu import Allocate, MatrixLayout, PackedMatrix
from appliance.quant.packed import pack

# Raised with every change of the layout, or of which weights are packed under which name.
_LAYOUT_VERSION = 1
# Smaller models are packed sooner than a file is looked for.
_LEAST_ELEMENTS = 1 << 25


def load_matrices(
    model: Path, weights: ModelWeights, names: Sequence[str], threads: int, progress: Progress
) -> tuple[dict[str, PackedMatrix], str]:
    """Each of the named weights of a model, packed; and why nothing is kept for the next load, "" where it is.

    Args:
        model: the file or folder that the weights are read from.
        threads: how many weights are read and packed at once.
    """
    if sum(weights.elements((name,)) for name in names) < _LEAST_ELEMENTS:
        return _pack(weights, names, _memory, threads, progress), ""
    with WeightCache.open(model, model_files(model), _LAYOUT_VERSION, threads) as cache:
        kept = {name: cache.get(name) for name in names} if cache.is_filled else {}
        found = {
            name: PackedMatrix(MatrixLayout.from_fields(each.layout), each.data, each.inputs)
            for name, each in kept.items()
            if each is not None
        }
        if len(found) == len(names):
            progress(1, 1)
            return found, ""
        matrices = _pack(weights, names, cache.allocate, threads, progress)
        for name, matrix in matrices.items():
            cache.add(name, asdict(matrix.layout), matrix.data, matrix.inputs)
        cache.commit()
        return matrices, cache.note


def _pack(
    weights: ModelWeights, names: Sequence[str], allocate: Allocate, threads: int, progress: Progress
) -> dict[str, PackedMatrix]:
    total = sum(weights.elements((name,)) for name in names)
    packed: dict[str, PackedMatrix] = {}
    done = 0
    with _one_torch_thread(), ThreadPoolExecutor(threads) as pool:
        try:
            matrices = pool.map(lambda name: pack(weights.read(name), allocate), names)
            for name, matrix in zip(names, matrices, strict=True):
                packed[name] = matrix
                done += weights.elements((name,))
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return packed


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Each weight in one thread: the parts of an operation wait for each other longer than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _memory(nbytes: int) -> torch.Tensor:
    pages = mmap.mmap(-1, nbytes)
    if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
