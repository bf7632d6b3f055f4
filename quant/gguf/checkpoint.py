"""A GGUF file as a checkpoint: canonical names, canonical weights, everything checked before data is read."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from appliance.quant import fields
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, and_others, located
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.blocks import READERS
from appliance.quant.gguf.file import GGUFFile, TensorInfo
from appliance.quant.gguf.names import file_name
from appliance.quant.gguf.supported import ARCHITECTURES
from appliance.quant.slots import Sizes, Slot, decoder_slots
from appliance.quant.tensor import DenseTensor, Weight

_VECTOR_TYPES = ("F32", "F16", "BF16")


class GGUFCheckpoint:
    """An open GGUF model.

    Attributes:
        metadata: every key of the file.
        architecture: the file's `general.architecture`.
        eos_token_ids: every token that ends generation, sorted.
        notes: sentences for the log.

    Raises:
        CheckpointError: the file is corrupt, lacks a tensor, or a tensor contradicts the metadata.
        UnsupportedFormatError: an architecture, tensor type or extra tensor that is not read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.notes: tuple[str, ...] = ()
        self._file = GGUFFile(path)
        self.metadata: dict[str, Any] = self._file.metadata
        try:
            with located(path):
                self.architecture = fields.text(self.metadata, "general.architecture")
                if self.architecture not in ARCHITECTURES:
                    known = ", ".join(ARCHITECTURES)
                    raise UnsupportedFormatError(
                        f"architecture {self.architecture!r} is not supported; what works: {known}"
                    )
                self._slots = self._check(decoder_slots(_sizes(self.metadata, self.architecture)))
                self.eos_token_ids = meta.eos_token_ids(self.metadata)
        except CheckpointError:
            self._file.close()
            raise

    def names(self) -> list[str]:
        """The canonical names of the tensors in this file."""
        return list(self._slots)

    def tensor_types(self) -> tuple[str, ...]:
        """The types of the file's tensors, the one that most bytes are of first."""
        nbytes: dict[str, int] = {}
        for slot in self._slots:
            info = self._file.tensors[file_name(slot)]
            nbytes[info.type.name] = nbytes.get(info.type.name, 0) + info.nbytes
        return tuple(sorted(nbytes, key=lambda name: -nbytes[name]))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the weight of a canonical name; nothing is read."""
        return self._slots[name].shape

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, rows in the model's own order; it shares no memory with the file.

        Raises:
            KeyError: no such name in this file.
        """
        slot = self._slots[name]
        info = self._file.tensors[file_name(name)]
        weight = READERS[info.type.name](self._file.data(info.name))
        if len(slot.shape) == 1:
            weight = _vector(weight)
        # Converters to this architecture permute the rows of queries and keys for their own RoPE.
        if slot.rope_heads:
            weight = weight.select_rows(_unpermuted(slot.shape[0], slot.rope_heads))
        return weight

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, slots: dict[str, Slot]) -> dict[str, Slot]:
        """The slots that the file fills, after checking that it fills all it must and holds nothing else."""
        tensors = self._file.tensors
        present = {name: slot for name, slot in slots.items() if file_name(name) in tensors}
        missing = [file_name(name) for name in slots.keys() - present.keys() if not slots[name].optional]
        if missing:
            raise CheckpointError(f"tensor {min(missing)!r} is missing{and_others(missing)}")
        extra = sorted(tensors.keys() - {file_name(name) for name in present})
        if extra:
            reason = " (it rescales RoPE's frequencies)" if extra[0] == "rope_freqs.weight" else ""
            raise UnsupportedFormatError(f"tensor {extra[0]!r}{reason} is not supported{and_others(extra)}")
        for name, slot in present.items():
            _check_tensor(slot, tensors[file_name(name)])
        return present


def _sizes(metadata: dict[str, Any], architecture: str) -> Sizes:
    def size(key: str, default: int | None = None) -> int:
        return fields.positive(metadata, f"{architecture}.{key}", default)

    hidden, heads = size("embedding_length"), size("attention.head_count")
    return Sizes(
        layers=size("block_count"),
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        key_dim=size("attention.key_length", hidden // heads),
        value_dim=size("attention.value_length", hidden // heads),
        vocab=len(fields.strings(metadata, meta.TOKENS_KEY)),
    )


def _check_tensor(slot: Slot, info: TensorInfo) -> None:
    if info.shape != slot.shape:
        raise CheckpointError(
            f"tensor {info.name!r} has shape {info.shape}; the metadata asks for {slot.shape}"
        )
    readable = _VECTOR_TYPES if len(slot.shape) == 1 else tuple(READERS)
    if info.type.name not in readable:
        known = ", ".join(readable)
        raise UnsupportedFormatError(
            f"tensor {info.name!r} has type {info.type.name}; what works here: {known}"
        )
    if slot.rope_heads and slot.shape[0] // slot.rope_heads % 2:
        raise CheckpointError(
            f"tensor {info.name!r} has an odd head dimension, expected an even one for RoPE"
        )


def _vector(weight: Weight) -> Weight:
    """One row [1, K] as [K]."""
    assert isinstance(weight, DenseTensor)
    return DenseTensor(weight.data[0])


def _unpermuted(rows: int, heads: int) -> torch.Tensor:
    """Where each row went: the converter interleaves the two halves of a head (0, d/2, 1, d/2 + 1, …)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)
