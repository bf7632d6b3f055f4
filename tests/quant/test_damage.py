"""Damaged model folders: every mutation is a typed error or loads exactly what was there, never anything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.families import read_spec
from appliance.engine.weights import ModelWeights
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = (
    "awq_gemm_g64",
    "awq_gemv_g64",
    "awq_gemvfast_g128",
    "awq_marlin_g128",
    "autoround_native_w4_g128_sym",
    "ct_w4a16_g64_asym_gptq",
    "ct013_w4a16_g64_sym_actgroup",
    "ct_w8a8_int8",
    "ct_fp8_dynamic",
    "gptqmodel_w3_g64_asym",
    "gptqmodel_w4_g64_sym_desc",
    "gptqmodel_w8_gneg1_asym_v2",
)
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm")
BROKEN_VALUES: tuple[Any, ...] = (None, "garbage", -1, 0, 2.5, True, [], {}, [1], 10**12)
# Keys that only people read, or whose values all mean something.
HARMLESS = {"bos_token_id", "pad_token_id", "transformers_version", "torch_dtype", "dtype", "use_cache"}

Mutation = tuple[str, Callable[[Path], None]]
Loaded = tuple[Any, dict[str, torch.Tensor]]


def load(folder: Path) -> Loaded:
    """The spec and every weight."""
    with open_checkpoint(folder) as checkpoint:
        weights = ModelWeights(checkpoint)
        spec = read_spec(checkpoint.architecture, checkpoint.metadata, weights.names)
        return spec, {name: weights.read(name).dequantize() for name in sorted(weights.names)}


def tensor_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        path = tensor_file(folder)
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return mutate


def edit_config(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_bytes())
        change(config)
        path.write_text(json.dumps(config))

    return mutate


def set_tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    return edit_tensors(lambda tensors: tensors.update({name: value}))


def tensor_mutations(folder: Path) -> Iterator[Mutation]:
    """Each tensor of a few layers dropped, renamed, retyped, reshaped, cut, and filled with what is no number."""
    tensors = load_file(tensor_file(folder))
    names = [name for name in tensors if any(layer in name for layer in LAYERS)]
    for name in (*names, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        tensor = tensors[name]
        yield f"{name} dropped", edit_tensors(lambda all_, name=name: all_.pop(name))
        yield (
            f"{name} renamed",
            edit_tensors(lambda all_, name=name: all_.update({name + "_": all_.pop(name)})),
        )
        for dtype in (torch.float64, torch.int64, torch.bool):
            yield f"{name} as {dtype}", set_tensor(name, tensor.to(dtype))
        yield f"{name} flat", set_tensor(name, tensor.reshape(-1, 1))
        yield f"{name} nested", set_tensor(name, tensor[None])
        yield f"{name} shorter", set_tensor(name, tensor[:-1])
        yield f"{name} longer", set_tensor(name, torch.cat([tensor, tensor[:1]]))
        if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
            yield f"{name} turned", set_tensor(name, tensor.t())
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            for value in (float("nan"), float("inf")):
                spoilt = tensor.clone()
                spoilt.view(-1)[-1] = value
                yield f"{name} with {value}", set_tensor(name, spoilt)


def config_mutations(folder: Path) -> Iterator[Mutation]:
    """Each key of config.json, and of its section on quantisation, removed and given values of wrong kinds."""
    config = json.loads((folder / "config.json").read_bytes())
    for key in sorted(config.keys() - HARMLESS):
        yield f"no {key}", edit_config(lambda all_, key=key: all_.pop(key))
        for value in BROKEN_VALUES:
            if value != config[key]:
                yield f"{key} is {value!r}", edit_config(lambda all_, key=key, v=value: all_.update({key: v}))
    for key in config["quantization_config"]:
        for value in BROKEN_VALUES:
            yield (
                f"quantization_config.{key} is {value!r}",
                edit_config(lambda all_, key=key, v=value: all_["quantization_config"].update({key: v})),
            )


def file_mutations(folder: Path) -> Iterator[Mutation]:
    """The weights' file cut short at many places, and with bytes of its header changed."""
    size = tensor_file(folder).stat().st_size
    for keep in (0, 1, 7, 8, 9, 100, *range(size // 16, size, size // 16), size - 1):

        def cut(folder: Path, keep: int = keep) -> None:
            path = tensor_file(folder)
            path.write_bytes(path.read_bytes()[:keep])

        yield f"cut to {keep}", cut
    for at in range(0, 600, 37):

        def flip(folder: Path, at: int = at) -> None:
            path = tensor_file(folder)
            raw = bytearray(path.read_bytes())
            raw[at] ^= 0x15
            path.write_bytes(raw)

        yield f"byte {at} flipped", flip


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("kind", [tensor_mutations, config_mutations, file_mutations])
def test_damage_is_a_typed_error_or_changes_nothing(
    name: str, kind: Callable[[Path], Iterator[Mutation]], tmp_path: Path
) -> None:
    spec, weights = load(GOLDEN / name)
    wrong, count = [], 0
    for label, mutate in kind(GOLDEN / name):
        folder = tmp_path / str(count)
        shutil.copytree(GOLDEN / name, folder)
        mutate(folder)
        count += 1
        try:
            found_spec, found = load(folder)
        except (CheckpointError, UnsupportedModelError) as error:
            if str(folder) not in str(error) and kind is not config_mutations:
                wrong.append(f"{label}: {error} names no file")
        except Exception as error:
            wrong.append(f"{label}: {type(error).__name__}: {error}")
        else:
            if found_spec != spec:
                wrong.append(f"{label}: another spec: {found_spec}")
            elif found.keys() != weights.keys():
                wrong.append(f"{label}: other weights: {found.keys() ^ weights.keys()}")
            else:
                wrong += [
                    f"{label}: other {key}" for key in weights if not torch.equal(found[key], weights[key])
                ]
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
