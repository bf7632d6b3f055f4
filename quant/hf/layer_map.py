"""Which tensors of a model folder make up which weight, and how each is stored: all that headers can tell. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.quant import fields
from appliance.quant.architectures import ARCHITECTURES, Architecture
from appliance.quant.errors import CheckpointError, and_others, located
from appliance.quant.hf import model_config
from appliance.quant.hf.experts import unstack
from appliance.quant.hf.file import TensorInfo
from appliance.quant.hf.formats import Format, announced, find_layout
from appliance.quant.hf.module import DENSE_DTYPES, Advice, Layout, Module
from appliance.quant.hf.names import as_saved, decoder_prefix, extra, module_name, vector_name
from appliance.quant.hf.quant_config import QuantConfig, read_quant_config
from appliance.quant.hf.shards import read_tensors
from appliance.quant.hf.tokenizer_files import TokenizerFiles
from appliance.quant.slots import Slot, decoder_slots

# Keys of config.json, and the layers that then have a bias.
_BIASES = {"attention_bias": ("q", "k", "v", "o"), "mlp_bias": ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class LayerMap:
    """A model folder, sorted.

    Attributes:
        modules, layouts: the matrices and how they are stored, by canonical name.
        vectors: norms and biases, by canonical name.
        notes: where configuration and tensors disagree, and what was skipped; sentences for the log.
    """

    config: Mapping[str, Any]
    architecture: str
    quant: QuantConfig
    modules: Mapping[str, Module]
    layouts: Mapping[str, Layout]
    vectors: Mapping[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


def read_layer_map(folder: Path) -> LayerMap:
    """Sort a model folder by its configuration and its files' headers.

    Raises:
        CheckpointError: a file is corrupt, a tensor is missing, too many, or contradicts the configuration.
        UnsupportedFormatError: an architecture or a format that is not read.
        OSError: a file cannot be read.
    """
    with located(folder):
        return _sorted(folder)


def _sorted(folder: Path) -> LayerMap:
    config = model_config.read_config(folder)
    with located(folder / "config.json"):
        sizes = model_config.sizes(config)
    eos_token_ids = model_config.eos_token_ids(folder, config, TokenizerFiles.read(folder))
    quant, notes = read_quant_config(folder, config)
    format_ = announced(quant)
    tensors = read_tensors(folder)
    prefix = decoder_prefix(tensors)
    architecture = as_saved(ARCHITECTURES[model_config.architecture(config)], tensors)
    slots = _required(decoder_slots(sizes, architecture), config)
    by_module = _by_module(tensors)
    if architecture.experts is not None and sizes.experts is not None:
        unstack(by_module, architecture.experts, sizes.experts.count)
    modules, vectors = _fill(slots, by_module, prefix, architecture)
    layouts = {name: find_layout(module, quant) for name, module in modules.items()}
    used = {info.name for info in vectors.values()}
    for name, layout in layouts.items():
        used.update(modules[name].tensors[suffix].name for suffix in layout.uses)
    leftover = sorted(tensors.keys() - used)
    prediction_layers = range(sizes.layers, sizes.layers + _prediction_layers(config))
    notes += format_.notes(quant)
    notes += tuple(_disagreements(format_, quant, modules, layouts))
    notes += tuple(_skipped(leftover, tensors, prefix, prediction_layers))
    return LayerMap(
        config, model_config.architecture(config), quant, modules, layouts, vectors, eos_token_ids, notes
    )


def _required(slots: Mapping[str, Slot], config: Mapping[str, Any]) -> dict[str, Slot]:
    """The slots, with none optional that the configuration says the model has."""
    wanted = {"head"} if not fields.flag(config, "tie_word_embeddings", False) else set()
    for key, stems in _BIASES.items():
        if fields.flag(config, key, False):
            wanted.update(f"{stem}.bias" for stem in stems)
    return {
        name: replace(slot, optional=slot.optional and name.split(".", 2)[-1] not in wanted)
        for name, slot in slots.items()
    }


def _fill(
    slots: Mapping[str, Slot],
    by_module: Mapping[str, Mapping[str, TensorInfo]],
    prefix: str,
    architecture: Architecture,
) -> tuple[dict[str, Module], dict[str, TensorInfo]]:
    """The matrices and the vectors that a model has, from the tensors that are there."""
    modules: dict[str, Module] = {}
    vectors: dict[str, TensorInfo] = {}
    for name, slot in slots.items():
        if len(slot.shape) == 2:
            module = module_name(name, prefix, architecture)
            own = {suffix: info for suffix, info in by_module.get(module, {}).items() if suffix != "bias"}
            if own or not slot.optional:
                modules[name] = Module(module, (slot.shape[0], slot.shape[1]), own)
        else:
            tensor = vector_name(name, prefix, architecture)
            module, _, suffix = tensor.rpartition(".")
            info = by_module.get(module, {}).get(suffix)
            if info is not None or not slot.optional:
                vectors[name] = _vector(tensor, info, slot)
    return modules, vectors


def _by_module(tensors: Mapping[str, TensorInfo]) -> defaultdict[str, dict[str, TensorInfo]]:
    """Module → suffix → tensor."""
    modules: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules[module][suffix] = info
    return modules


def _vector(name: str, info: TensorInfo | None, slot: Slot) -> TensorInfo:
    expected = f"{' or '.join(DENSE_DTYPES)} {list(slot.shape)}"
    if info is None:
        raise CheckpointError(f"tensor {name!r} is missing, expected {expected}")
    if info.dtype not in DENSE_DTYPES or info.shape != slot.shape:
        raise CheckpointError(f"{info.file}: tensor {name!r} is {info}, expected {expected}")
    return info


def _prediction_layers(config: Mapping[str, Any]) -> int:
    return max(0, fields.integer(config, "num_nextn_predict_layers", 0))


def _skipped(
    leftover: list[str], tensors: Mapping[str, TensorInfo], prefix: str, prediction_layers: range
) -> list[str]:
    """One sentence for each kind of known extra.

    Raises:
        CheckpointError: a tensor that belongs to nothing known.
    """
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for name in leftover:
        kinds[extra(name, prefix, prediction_layers)].append(name)
    unknown = kinds.pop("", [])
    if unknown:
        raise CheckpointError(
            f"{tensors[unknown[0]].file}: tensor {unknown[0]!r} belongs to no layer of this model"
            f"{and_others(unknown)}; configuration and weights are not of one model, or a part of it is not supported"
        )
    return [f"skipped {names[0]}{and_others(names)}: {what}" for what, names in kinds.items()]


def _disagreements(
    format_: Format, quant: QuantConfig, modules: Mapping[str, Module], layouts: Mapping[str, Layout]
) -> list[str]:
    """One sentence for each kind of claim that the tensors contradict, with the first layer as the example."""
    examples: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, layout in layouts.items():
        module = modules[name]
        advice = format_.advise(quant, module.name)
        for claim, found in _contradictions(advice, layout, module):
            counts[claim, found] += 1
            examples.setdefault((claim, found), module.name)
    return [
        f"{quant.source} says that {example} is {claim}, its tensors say {found}"
        f"{and_others(range(counts[claim, found]))}: the tensors decide"
        for (claim, found), example in examples.items()
    ]


def _contradictions(advice: Advice, layout: Layout, module: Module) -> list[tuple[str, str]]:
    """Claims and what was found instead."""
    scheme = layout.scheme
    if scheme is None:
        return [("quantised", "it is dense")] if advice.quantized else []
    if advice.quantized is False:
        return [("not quantised", f"{layout.format}")]
    found = []
    if advice.bits not in (None, scheme.bits):
        found.append((f"of {advice.bits} bits", f"{scheme.bits}"))
    claimed = module.shape[1] if advice.group_size == -1 else advice.group_size
    if claimed is not None and min(claimed, module.shape[1]) != scheme.group_size:
        found.append((f"in groups of {claimed}", f"{scheme.group_size}"))
    return found
