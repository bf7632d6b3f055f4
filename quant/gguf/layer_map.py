"""Which tensors of a GGUF file make up which weight, checked against its metadata. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.quant import fields
from appliance.quant.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from appliance.quant.errors import CheckpointError, UnsupportedFormatError, and_others, located
from appliance.quant.gguf import metadata as meta
from appliance.quant.gguf.file import GGUFFile, TensorInfo
from appliance.quant.gguf.names import expert_number, file_name
from appliance.quant.gguf.supported import TENSOR_TYPES, VECTOR_TYPES
from appliance.quant.slots import Sizes, Slot, decoder_slots


@dataclass(frozen=True, slots=True)
class LayerMap:
    """A GGUF file, sorted.

    Attributes:
        metadata: the file's, and RoPE's factors under the names of their tensors.
        slots: every weight that the file has, by canonical name.
        tensors: the tensors of the same.
    """

    architecture: str
    metadata: Mapping[str, Any]
    slots: Mapping[str, Slot]
    tensors: Mapping[str, TensorInfo]
    eos_token_ids: tuple[int, ...]


def read_layer_map(file: GGUFFile) -> LayerMap:
    """Sort an open file by its header.

    Raises:
        CheckpointError: it lacks a tensor, or a tensor contradicts the metadata.
        UnsupportedFormatError: an architecture, tensor type or extra tensor that is not read.
    """
    with located(file.path):
        parts = file.metadata.get("split.count", 0)
        if parts not in (0, 1):
            raise UnsupportedFormatError(f"one of {parts} parts; merge them into one file first (gguf-split)")
        architecture = fields.text(file.metadata, "general.architecture")
        if architecture not in GGUF_ARCHITECTURES:
            known = ", ".join(sorted(GGUF_ARCHITECTURES))
            raise UnsupportedFormatError(
                f"architecture {architecture!r} is not supported; what works: {known}"
            )
        for info in file.tensors.values():
            _check_type(info, TENSOR_TYPES)
        factors = _rope_factors(file)
        family = ARCHITECTURES[GGUF_ARCHITECTURES[architecture]]
        sizes = _sizes(file.metadata, architecture)
        wanted = decoder_slots(sizes, family)
        files = {name: file_name(name, family) for name in wanted}
        weights = {name: info for name, info in file.tensors.items() if name not in factors}
        slots = _filled(wanted, files, weights)
        tensors = {name: _own(name, weights[files[name]], sizes) for name in slots}
        for name, slot in slots.items():
            _check_tensor(slot, tensors[name])
        metadata = {**file.metadata, **factors}
        return LayerMap(architecture, metadata, slots, tensors, meta.eos_token_ids(metadata))


def _rope_factors(file: GGUFFile) -> dict[str, list[float]]:
    """Few numbers that are part of how positions are turned: converters write them as tensors."""
    factors = {}
    for name in meta.ROPE_FACTOR_KEYS:
        info = file.tensors.get(name)
        if info is None:
            continue
        if info.type.name != "F32" or len(info.shape) != 1:
            raise CheckpointError(
                f"tensor {name!r} has type {info.type.name} and shape {info.shape}, expected F32 of one dimension"
            )
        factors[name] = file.data(info).view("<f4")[0].tolist()
    return factors


def _sizes(metadata: Mapping[str, Any], architecture: str) -> Sizes:
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
        experts=meta.expert_sizes(metadata, architecture),
    )


def _own(name: str, info: TensorInfo, sizes: Sizes) -> TensorInfo:
    """The part of a tensor that is of one expert; all of it where no expert is meant."""
    expert = expert_number(name)
    if expert is None or sizes.experts is None:
        return info
    count = sizes.experts.count
    if len(info.shape) < 2 or info.shape[0] != count:
        raise CheckpointError(
            f"tensor {info.name!r} has shape {info.shape}; the metadata asks for {count} experts"
        )
    nbytes = info.nbytes // count
    return replace(info, shape=info.shape[1:], offset=info.offset + expert * nbytes, nbytes=nbytes)


def _filled(
    slots: Mapping[str, Slot], files: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> dict[str, Slot]:
    """The slots that the file fills, after checking that it fills all it must and holds nothing else."""
    present = {name: slot for name, slot in slots.items() if files[name] in tensors}
    missing = {files[name] for name in slots.keys() - present.keys() if not slots[name].optional}
    if missing:
        raise CheckpointError(f"tensor {min(missing)!r} is missing{and_others(missing)}")
    extra = sorted(tensors.keys() - {files[name] for name in present})
    if extra:
        raise UnsupportedFormatError(f"tensor {extra[0]!r} is not supported{and_others(extra)}")
    return present


def _check_tensor(slot: Slot, info: TensorInfo) -> None:
    if info.shape != slot.shape:
        raise CheckpointError(
            f"tensor {info.name!r} has shape {info.shape}; the metadata asks for {slot.shape}"
        )
    if len(slot.shape) == 1:
        _check_type(info, VECTOR_TYPES)


def _check_type(info: TensorInfo, types: Collection[str]) -> None:
    if info.type.name not in types:
        raise UnsupportedFormatError(
            f"tensor {info.name!r} has type {info.type.name}; what works here: {', '.join(types)}"
        )
