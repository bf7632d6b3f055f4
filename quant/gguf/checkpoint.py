"""A GGUF file as a checkpoint: canonical names, canonical weights, everything checked before data is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from appliance.quant.errors import CheckpointError, UnsupportedFormatError
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.file import GGUFFile, TensorInfo
from appliance.quant.gguf.readers import READERS
from appliance.quant.gguf.supported import ARCHITECTURES, TENSOR_TYPES, VECTOR_TYPES
from appliance.quant.tensor import DenseTensor, Weight

_MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the metadata says the tensors' shapes are made of."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor that a model has.

    Attributes:
        name: in the file.
        permuted_heads: where the converter permuted the rows for its own RoPE, the number of heads; else 0.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    permuted_heads: int = 0


class GGUFCheckpoint:
    """An open GGUF model.

    Canonical names: `embed`, `final_norm`, `head` (absent when tied to `embed`), and for each layer
    `layers.{i}.` + `attn_norm`, `q`, `k`, `v`, `o`, `mlp_norm`, `gate`, `up`, `down`; biases, where there are
    any, add `.bias`.

    Attributes:
        metadata: every key of the file.
        architecture: the file's `general.architecture`.
        eos_token_ids: every token that ends generation, sorted.

    Raises:
        CheckpointError: the file is corrupt, lacks a tensor, or a tensor contradicts the metadata.
        UnsupportedFormatError: an architecture, tensor type or extra tensor that is not read.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(path)
        self.metadata: dict[str, Any] = self._file.metadata
        try:
            self.architecture = meta.text(self.metadata, "general.architecture")
            if self.architecture not in ARCHITECTURES:
                known = ", ".join(ARCHITECTURES)
                raise UnsupportedFormatError(
                    f"architecture {self.architecture!r} is not supported; what works: {known}"
                )
            self._slots = self._check(_llama_slots(_sizes(self.metadata, self.architecture)))
            self.eos_token_ids = meta.eos_token_ids(self.metadata)
        except CheckpointError as error:
            self._file.close()
            raise type(error)(f"{path}: {error}") from None

    def names(self) -> list[str]:
        """The canonical names of the tensors in this file."""
        return list(self._slots)

    def tensor_types(self) -> tuple[str, ...]:
        """The types of the file's tensors, the one that most bytes are of first."""
        nbytes: dict[str, int] = {}
        for slot in self._slots.values():
            info = self._file.tensors[slot.name]
            nbytes[info.type.name] = nbytes.get(info.type.name, 0) + info.nbytes
        return tuple(sorted(nbytes, key=lambda name: -nbytes[name]))

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, rows in the model's own order; it shares no memory with the file.

        Raises:
            KeyError: no such name in this file.
        """
        slot = self._slots[name]
        info = self._file.tensors[slot.name]
        weight = READERS[info.type.name](self._file.data(slot.name))
        if len(slot.shape) == 1:
            weight = _vector(weight)
        if slot.permuted_heads:
            weight = weight.select_rows(_unpermuted(slot.shape[0], slot.permuted_heads))
        return weight

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GGUFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, slots: dict[str, _Slot]) -> dict[str, _Slot]:
        """The slots that the file fills, after checking that it fills all it must and holds nothing else."""
        tensors = self._file.tensors
        present = {name: slot for name, slot in slots.items() if slot.name in tensors}
        missing = [slot.name for slot in slots.values() if slot.name not in tensors and not slot.optional]
        if missing:
            raise CheckpointError(f"tensor {missing[0]!r} is missing{_and_others(missing)}")
        extra = sorted(tensors.keys() - {slot.name for slot in present.values()})
        if extra:
            reason = " (it rescales RoPE's frequencies)" if extra[0] == "rope_freqs.weight" else ""
            raise UnsupportedFormatError(f"tensor {extra[0]!r}{reason} is not supported{_and_others(extra)}")
        for slot in present.values():
            _check_tensor(slot, tensors[slot.name])
        return present


def _sizes(metadata: dict[str, Any], architecture: str) -> _Sizes:
    def size(key: str, default: int | None = None) -> int:
        return meta.positive(metadata, f"{architecture}.{key}", default)

    hidden, heads = size("embedding_length"), size("attention.head_count")
    layers = size("block_count")
    if layers > _MAX_LAYERS:
        raise CheckpointError(f"{architecture}.block_count is {layers}, expected at most {_MAX_LAYERS}")
    kv_heads = size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} attention heads over {kv_heads} key-value heads, expected a multiple")
    key_dim = size("attention.key_length", hidden // heads)
    return _Sizes(
        layers=layers,
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=size("attention.value_length", hidden // heads),
        vocab=len(meta.strings(metadata, meta.TOKENS_KEY)),
    )


def _llama_slots(sizes: _Sizes) -> dict[str, _Slot]:
    """Every tensor of a dense Llama, by canonical name."""
    hidden = sizes.hidden
    slots = {
        "embed": _Slot("token_embd.weight", (sizes.vocab, hidden)),
        "final_norm": _Slot("output_norm.weight", (hidden,)),
        "head": _Slot("output.weight", (sizes.vocab, hidden), optional=True),
    }
    q_rows, k_rows = sizes.heads * sizes.key_dim, sizes.kv_heads * sizes.key_dim
    v_rows = sizes.kv_heads * sizes.value_dim
    linears = {
        "q": ("attn_q", q_rows, hidden, sizes.heads),
        "k": ("attn_k", k_rows, hidden, sizes.kv_heads),
        "v": ("attn_v", v_rows, hidden, 0),
        "o": ("attn_output", hidden, sizes.heads * sizes.value_dim, 0),
        "gate": ("ffn_gate", sizes.intermediate, hidden, 0),
        "up": ("ffn_up", sizes.intermediate, hidden, 0),
        "down": ("ffn_down", hidden, sizes.intermediate, 0),
    }
    for layer in range(sizes.layers):
        ours, theirs = f"layers.{layer}", f"blk.{layer}"
        slots[f"{ours}.attn_norm"] = _Slot(f"{theirs}.attn_norm.weight", (hidden,))
        slots[f"{ours}.mlp_norm"] = _Slot(f"{theirs}.ffn_norm.weight", (hidden,))
        for name, (stem, rows, columns, heads) in linears.items():
            slots[f"{ours}.{name}"] = _Slot(f"{theirs}.{stem}.weight", (rows, columns), permuted_heads=heads)
            slots[f"{ours}.{name}.bias"] = _Slot(f"{theirs}.{stem}.bias", (rows,), True, heads)
    return slots


def _check_tensor(slot: _Slot, info: TensorInfo) -> None:
    if info.shape != slot.shape:
        raise CheckpointError(
            f"tensor {slot.name!r} has shape {info.shape}; the metadata asks for {slot.shape}"
        )
    readable = VECTOR_TYPES if len(slot.shape) == 1 else TENSOR_TYPES
    if info.type.name not in readable:
        known = ", ".join(readable)
        raise UnsupportedFormatError(
            f"tensor {slot.name!r} has type {info.type.name}; what works here: {known}"
        )
    if slot.permuted_heads and slot.shape[0] // slot.permuted_heads % 2:
        raise CheckpointError(
            f"tensor {slot.name!r} has an odd head dimension, expected an even one for RoPE"
        )


def _vector(weight: Weight) -> Weight:
    """One row [1, K] as [K]."""
    assert isinstance(weight, DenseTensor)
    return DenseTensor(weight.data[0])


def _unpermuted(rows: int, heads: int) -> torch.Tensor:
    """Where each row went: the converter interleaves the two halves of a head (0, d/2, 1, d/2 + 1, …)."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""
