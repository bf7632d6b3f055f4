"""Logits against transformers, on checkpoints made by other tools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import BACKENDS, UnroundedWeights, load_executor

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors import Executor
from appliance.engine.families import read_spec
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow
from appliance.kernels.linear.cpu import Precision
from appliance.quant.errors import CheckpointError
from appliance.quant.gguf.checkpoint import GGUFCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = (
    *("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    *("q2_k", "q3_k_m", "q4_k_m", "q6_k", "iq4_nl", "iq4_xs"),
)
MODELS = [f"gguf_{kind}" for kind in KINDS]
EXPECTED = {
    key.removesuffix(".logits"): archive
    for archive in sorted(GOLDEN.glob("*.npz"))
    for key in np.load(archive)
    if key.endswith(".logits")
}


def load(folder: Path, backend: str = "reference", *, dense_bytes: int = 2**30) -> Executor:
    return load_executor(next(folder.glob("*.gguf"), folder), backend, dense_bytes=dense_bytes)


def logits_at(executor: Executor, ids: list[int], start: int, stop: int) -> torch.Tensor:
    """Logits after token stop - 1, computing tokens start … stop - 1 in blocks 5, 3, 9, …"""
    row = PlanRow("r", tuple(ids[start:stop]), start, ((5, 3, 9, 0),), True, SamplingParams(), (0,))
    executor.run([row], [])
    return executor.logits([stop - start - 1])[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_position_agree_with_transformers(name: str, backend: str) -> None:
    folder = GOLDEN / name
    expected = load_file(folder / "expected.safetensors")
    ids = expected["input_ids"][0].tolist()
    executor = load(folder, backend)
    assert_close(logits_of_all(executor, ids), expected["logits"][0])


@pytest.mark.parametrize("name", EXPECTED)
def test_logits_of_model_folders_agree_with_transformers(name: str) -> None:
    archive = np.load(EXPECTED[name])
    ids = archive[f"{name}.input_ids"][0].tolist()
    got = logits_of_all(load(GOLDEN / name, dense_bytes=0), ids)
    assert_close(got, torch.from_numpy(archive[f"{name}.logits"][0]))


@pytest.mark.parametrize("name", EXPECTED)
def test_native_logits_of_model_folders_are_those_of_codes_and_scales(name: str) -> None:
    # Tools round what codes and scales give to 16 bits; native kernels multiply before anything is rounded.
    ids = np.load(EXPECTED[name])[f"{name}.input_ids"][0].tolist()
    reference = load_executor(GOLDEN / name, "reference", weights_type=UnroundedWeights)
    assert_close(logits_of_all(load(GOLDEN / name, "cpu"), ids), logits_of_all(reference, ids))


def logits_of_all(executor: Executor, ids: list[int]) -> torch.Tensor:
    """Logits of every position, computed one by one."""
    return torch.stack([logits_at(executor, ids, at, at + 1) for at in range(len(ids))])


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # Both compute in float32; what is left is the order of sums over at most 256 terms, a dozen times over.
    tolerance = 16 * torch.finfo(torch.float32).eps * 256**0.5 * expected.abs().max()
    assert (got - expected).abs().max() < tolerance


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_packed_weights_give_the_same_bits(name: str) -> None:
    ids = json.loads((GOLDEN / name / "meta.json").read_text())["tokenizer_probe"]["ids"]
    executor, packed = load(GOLDEN / name), load(GOLDEN / name, dense_bytes=0)
    whole = logits_at(executor, ids, 0, len(ids))
    for start in (0, 1, 16, 29):
        logits_at(executor, ids, 0, start) if start else None
        assert torch.equal(logits_at(executor, ids, start, len(ids)), whole), start
    assert torch.equal(logits_at(packed, ids, 0, len(ids)), whole)
    assert packed.weight_bytes <= executor.weight_bytes


@pytest.mark.parametrize("precision", ["int8", "bf16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_same_bits_natively(name: str, precision: Precision) -> None:
    ids = json.loads((GOLDEN / name / "meta.json").read_text())["tokenizer_probe"]["ids"]
    path = next((GOLDEN / name).glob("*.gguf"))
    executor = load_executor(path, "cpu", precision=precision, kv_dtype="bfloat16")
    whole = logits_at(executor, ids, 0, len(ids))
    for start in (1, 16, 29):
        logits_at(executor, ids, 0, start)
        assert torch.equal(logits_at(executor, ids, start, len(ids)), whole), start


def test_rope_scaling_and_other_architectures_are_refused_by_name() -> None:
    (path,) = (GOLDEN / "gguf_f16").glob("*.gguf")
    with GGUFCheckpoint(path) as checkpoint:
        metadata, names = checkpoint.metadata, frozenset(checkpoint.names())
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama"):
        read_spec("mamba", metadata, names)
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.type is 'ntk'"):
        read_spec("llama", {**metadata, "llama.rope.scaling.type": "ntk"}, names)
    with pytest.raises(UnsupportedModelError, match="expert_group_count is 8"):
        read_spec("llama", {**metadata, "llama.expert_group_count": 8}, names)
    with pytest.raises(
        UnsupportedModelError, match=r"attention\.sliding_window is 4096, which is not supported"
    ):
        read_spec("llama", {**metadata, "llama.attention.sliding_window": 4096}, names)
    with pytest.raises(CheckpointError, match=r"block_count' is -3"):
        read_spec("llama", {**metadata, "llama.block_count": -3}, names)
