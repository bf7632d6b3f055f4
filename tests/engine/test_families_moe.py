"""Families with experts against transformers: routing, windows, sinks, both spellings of their configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import BACKENDS
from test_engine import run, start
from test_model_golden import GOLDEN, assert_close, load

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors import Executor
from appliance.engine.families import read_spec
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import ClampedSwiglu
from appliance.engine.types import PlanRow
from appliance.quant.errors import CheckpointError
from appliance.quant.hf.checkpoint import HFCheckpoint

FAMILIES = ("arch_qwen3_moe", "arch_mixtral", "arch_gpt_oss")
TABLES = ((5, 3, 9), (0, 8, 1), (11, 2, 7), (4, 10, 6))


def spelled(name: str, spelling: str, folder: Path) -> Path:
    """The fixture with the configuration in that spelling."""
    shutil.copy(GOLDEN / name / spelling, folder / "config.json")
    shutil.copy(GOLDEN / name / "model.safetensors", folder)
    return folder


def step(executor: Executor, parts: dict[int, tuple[list[int], int]]) -> dict[int, torch.Tensor]:
    """Logits of every token of a batch: table → (tokens, position of the first)."""
    groups = len(executor._layout.groups)  # type: ignore[attr-defined]
    rows = tuple(
        PlanRow(str(place), tuple(ids), start, (TABLES[place],) * groups, True, SamplingParams(), (0,))
        for place, (ids, start) in parts.items()
    )
    executor.run(rows, [])
    lengths = [len(ids) for ids, _ in parts.values()]
    return dict(zip(parts, executor.logits(range(sum(lengths))).split(lengths), strict=True))


def real_rows(expected: dict[str, torch.Tensor]) -> list[list[int]]:
    lengths = expected["lengths"].tolist()
    return [expected["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)]


@pytest.mark.parametrize("spelling", ["config.json", "config.legacy.json"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_agree_with_transformers_however_they_are_computed(
    name: str, spelling: str, backend: str, tmp_path: Path
) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    rows = real_rows(expected)
    executor = load(spelled(name, spelling, tmp_path), backend)
    whole = step(executor, {place: (ids, 0) for place, ids in enumerate(rows)})
    for place, ids in enumerate(rows):
        assert_close(whole[place], expected["logits"][place, : len(ids)])
        chunks = [step(executor, {place: (ids[at : at + 5], at)})[place] for at in range(0, len(ids), 5)]
        assert torch.equal(torch.cat(chunks), whole[place])
    strangers = {2: ([7, 90, 33] * 9, 0), 0: (rows[0], 0), 3: ([64] * 40, 0), 1: (rows[1], 0)}
    among = step(executor, strangers)
    assert all(torch.equal(among[place], whole[place]) for place in whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_agree_with_transformers(name: str, backend: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    executor = load(GOLDEN / name, backend, dense_bytes=0)
    rows = real_rows(expected)
    logits = step(executor, {place: (ids, 0) for place, ids in enumerate(rows)})
    greedy: list[list[int]] = [[], []]
    for _ in range(16):
        for place, tokens in enumerate(greedy):
            tokens.append(int(logits[place][-1].argmax()))
        logits = step(
            executor,
            {place: (tokens[-1:], len(rows[place]) + len(tokens) - 1) for place, tokens in enumerate(greedy)},
        )
    assert greedy == expected["greedy"].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_says_what_transformers_says_in_chunks_and_among_strangers(name: str) -> None:
    expected = load_file(GOLDEN / name / "expected.safetensors")
    rows = real_rows(expected)
    engine = start(str(GOLDEN / name), max_num_batched_tokens=16)
    prompts = [*rows, [7, 90, 33] * 20, rows[0][:9], [64] * 40]
    assert [list(text) for text in run(engine, prompts, max_tokens=16)[:2]] == expected["greedy"].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_experts_give_the_same_bits(name: str) -> None:
    ids = real_rows(load_file(GOLDEN / name / "expected.safetensors"))[0]
    dense, packed = load(GOLDEN / name), load(GOLDEN / name, dense_bytes=0)
    assert torch.equal(step(dense, {0: (ids, 0)})[0], step(packed, {0: (ids, 0)})[0])


def config(name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((GOLDEN / name / "config.json").read_text())
    return loaded


def test_what_the_configuration_says_of_experts_is_read() -> None:
    def spec_of(name: str, **changes: object):  # type: ignore[no-untyped-def]
        changed = {**config(name), **changes}
        return read_spec(changed["architectures"][0], changed, frozenset({"head"}))  # type: ignore[index]

    experts = spec_of("arch_qwen3_moe", norm_topk_prob=None).experts
    assert (experts.count, experts.top_k, experts.normalised) == (8, 2, False)
    assert spec_of("arch_qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2).experts.layers == {1, 3, 5}
    assert spec_of("arch_qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 3]).experts.layers == {1, 2}
    assert spec_of("arch_qwen3_moe", use_sliding_window=True, sliding_window=8).layers[1].window == 8
    assert spec_of("arch_qwen3_moe", sliding_window=8).layers[1].window == 0
    assert spec_of("arch_mixtral", sliding_window=9).layers[0].window == 9
    gpt_oss = spec_of("arch_gpt_oss", layer_types=None, swiglu_limit=None, swiglu_alpha=None)
    assert [layer.window for layer in gpt_oss.layers] == [8, 0]
    assert gpt_oss.experts.activation == ClampedSwiglu(1.702, 7.0)
    with pytest.raises(CheckpointError, match="9 experts to a token, expected at most all 8"):
        spec_of("arch_mixtral", num_experts_per_tok=9)
    with pytest.raises(UnsupportedModelError, match="hidden_act is 'relu6'"):
        spec_of("arch_mixtral", hidden_act="relu6")
    with pytest.raises(UnsupportedModelError, match="layer_types names 'chunked_attention'"):
        spec_of("arch_gpt_oss", layer_types=["chunked_attention"] * 2)


def test_missing_biases_of_experts_are_refused(tmp_path: Path) -> None:
    for stem in ("router.bias", "experts.down_proj_bias"):
        folder = spelled("arch_gpt_oss", "config.json", tmp_path)
        tensors = load_file(folder / "model.safetensors")
        del tensors[f"model.layers.1.mlp.{stem}"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.\S+bias' is missing, expected"):
            HFCheckpoint(folder)


def test_impossible_experts_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"num_local_experts": 5000}, "5000 experts, expected at most 1024"),
        ({"num_local_experts": 3}, r"gate_up_proj' is F32 \[4, 64, 40\], expected one of 3 experts"),
        ({"mlp_only_layers": "all"}, "'mlp_only_layers' is 'all', expected a list of layers"),
    ):
        folder = spelled("arch_gpt_oss", "config.json", tmp_path)
        (folder / "config.json").write_text(json.dumps({**config("arch_gpt_oss"), **changes}))
        with pytest.raises(CheckpointError, match=message):
            HFCheckpoint(folder)
