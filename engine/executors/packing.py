"""A model's matrices in the native library's layout, kept beside the model for the next load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from appliance.engine.packed_files import model_files
from appliance.engine.weight_cache import WeightCache
from appliance.engine.weights import ModelWeights, Progress
from appliance.kernels.linear.cpu import Allocate, MatrixLayout, PackedMatrix
from appliance.kernels.memory import anonymous
from appliance.quant.packed import pack

# Raised with every change of the layout, or of which weights are packed under which name.
_LAYOUT_VERSION = 1
# Smaller models are packed sooner than a file is looked for.
_LEAST_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True)
class LoadedMatrices:
    """Packed weights by name.

    Attributes:
        note: why nothing is kept for the next load, "" where it is.
        mapped_bytes: of them in a file's pages, which the system counts as free.
    """

    by_name: dict[str, PackedMatrix]
    note: str = ""
    mapped_bytes: int = 0


def load_matrices(
    model: Path, weights: ModelWeights, names: Sequence[str], threads: int, progress: Progress
) -> LoadedMatrices:
    """Each of the named weights of a model, packed.

    Args:
        model: the file or folder that the weights are read from.
        threads: how many weights are read and packed at once.
    """
    if sum(weights.elements((name,)) for name in names) < _LEAST_ELEMENTS:
        return LoadedMatrices(_pack(weights, names, _memory, threads, progress))
    with WeightCache.open(model, model_files(model), _LAYOUT_VERSION, threads) as cache:
        kept = {name: cache.get(name) for name in names} if cache.is_filled else {}
        found = {
            name: PackedMatrix(MatrixLayout.from_fields(each.layout), each.data, each.inputs)
            for name, each in kept.items()
            if each is not None
        }
        if len(found) == len(names):
            progress(1, 1)
            return LoadedMatrices(found, mapped_bytes=_num_bytes(found))
        matrices = _pack(weights, names, cache.allocate, threads, progress)
        for name, matrix in matrices.items():
            cache.add(name, asdict(matrix.layout), matrix.data, matrix.inputs)
        cache.commit()
        return LoadedMatrices(matrices, cache.note, 0 if cache.note else _num_bytes(matrices))


def _num_bytes(matrices: Mapping[str, PackedMatrix]) -> int:
    return sum(matrix.data.nbytes for matrix in matrices.values())


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


def _memory(num_bytes: int) -> torch.Tensor:
    return anonymous(num_bytes, huge_pages=True)
