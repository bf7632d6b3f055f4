"""The whole engine on a tiny model whose layers differ in their windows, against the same model in one KV group."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import BACKENDS, EXACT

from appliance.engine import loading
from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.spec import DecoderSpec, LayerSpec
from appliance.engine.types import Request
from appliance.kernels.kv_layout import KVGroup

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 32, 2, 1, 16, 48, 64
BLOCK = 16
BLOCK_BYTES = 2 * KV_HEADS * BLOCK * HEAD_DIM * 4  # of one layer, in float32
# Two groups that give blocks back and one that doesn't; and none that doesn't.
MIXED, ALL_WINDOWS = (20, 0, 20, 9), (9, 20, 9, 20)
PROMPTS = [
    [3 + (7 * p + i * (p + 3)) % 60 for i in range(length)] for p, length in enumerate((90, 4, 33, 3, 5))
]
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with random weights, sharp enough that a lost key changes the text."""
    torch.manual_seed(11)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(4):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            p + "mlp.gate_proj": (MLP, HIDDEN),
            p + "mlp.up_proj": (MLP, HIDDEN),
            p + "mlp.down_proj": (HIDDEN, MLP),
        }
        norms += [p + "input_layernorm", p + "post_attention_layernorm"]
    tensors = {f"{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    path = tmp_path_factory.mktemp("windowed")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def one_group(spec: DecoderSpec, dtype: torch.dtype) -> tuple[KVGroup, ...]:
    return (KVGroup(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, dtype),)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def start(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Start:
    """Starts an engine on the model with the given windows; `whole`: all layers keep everything, in one group."""
    read_spec, kv_groups = loading.read_spec, loading.kv_groups

    def start(windows: tuple[int, ...], *, whole: bool = False, **config: Any) -> Engine:
        layers = tuple(LayerSpec(window=window) for window in windows)
        monkeypatch.setattr(loading, "read_spec", lambda *args: replace(read_spec(*args), layers=layers))
        monkeypatch.setattr(loading, "kv_groups", one_group if whole else kv_groups)
        settings = {
            "backend": request.param,
            **EXACT,
            "block_size": BLOCK,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 6,
            "num_threads": 1,
        }
        return Engine(EngineConfig(model_path=str(folder), **{**settings, **config}))

    return start


def run(
    engine: Engine, prompts: list[list[int]] = PROMPTS, **sampling: Any
) -> dict[tuple[str, int], tuple[int, ...]]:
    for index, prompt in enumerate(prompts):
        params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 100 + index, **sampling}
        engine.add(
            Request(
                id=str(index), prompt_ids=tuple(prompt), sampling=SamplingParams(**params), arrived_at=index
            )
        )
    texts: dict[tuple[str, int], tuple[int, ...]] = defaultdict(tuple)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            texts[event.request_id, event.index] += event.token_ids
        engine.scheduler.check()
    assert engine.stats().blocks_used == 0
    return dict(texts)


@pytest.mark.parametrize(("windows", "too_few"), [(MIXED, 22), (ALL_WINDOWS, 24)])
def test_text_is_that_of_one_group_whatever_the_chunks_the_cache_and_the_memory(
    start: Start, windows: tuple[int, ...], too_few: int
) -> None:
    expected = run(start(windows, whole=True, enable_prefix_caching=False))
    assert expected != run(start((0, 0, 0, 0), enable_prefix_caching=False)), "windows must matter"
    for chunk in (7, 128):
        assert run(start(windows, enable_prefix_caching=False, max_num_batched_tokens=chunk)) == expected
    cached = start(windows)
    assert run(cached) == expected
    assert run(cached) == expected
    assert cached.stats().prefix_hit_tokens_total == 80 + 32
    further = [[*prompt, 9, 8, 7] for prompt in PROMPTS[::2]]
    assert run(cached, further) == run(start(windows, whole=True), further)
    tight = start(windows, kv_cache_memory_bytes=too_few * BLOCK_BYTES)
    assert run(tight) == expected
    assert tight.stats().preemptions_total > 0


@pytest.mark.parametrize("windows", [MIXED, ALL_WINDOWS])
def test_continuations_are_those_of_one_group(start: Start, windows: tuple[int, ...]) -> None:
    expected = run(start(windows, whole=True), PROMPTS[:2], n=4, max_tokens=12)
    assert len(set(expected.values())) == 8
    for config in ({}, {"max_num_seqs": 2}, {"kv_cache_memory_bytes": 30 * BLOCK_BYTES}):
        assert run(start(windows, **config), PROMPTS[:2], n=4, max_tokens=12) == expected


def test_nothing_that_a_sequence_does_not_hold_reaches_its_text(start: Start) -> None:
    expected = run(start(MIXED, whole=True), PROMPTS[:1])
    engine = start(MIXED, enable_prefix_caching=False)
    step = engine.step

    def poisoned() -> Any:
        for group, pool in enumerate(engine._runner._executor._pools):
            held = {block_id for seq in engine.scheduler.running for block_id in seq.tables[group]}
            pool = pool.view(torch.float32) if pool.dtype is torch.uint8 else pool
            pool[[block_id for block_id in range(len(pool)) if block_id not in held]] = float("nan")
        return step()

    engine.step = poisoned  # type: ignore[method-assign]
    assert run(engine, PROMPTS[:1]) == expected


def beams(engine: Engine, width: int = 3, length: int = 12) -> list[tuple[int, ...]]:
    """The most likely texts found by a search that steers the engine."""
    sampling = SamplingParams(temperature=0.0, max_tokens=length + 1, logprobs=2 * width, ignore_eos=True)
    engine.add(
        Request(id="b", prompt_ids=tuple(PROMPTS[0]), sampling=sampling, arrived_at=0.0, is_steered=True)
    )
    found: dict[int, tuple[tuple[int, ...], float]] = {0: ((), 0.0)}
    for _ in range(length):
        grown: list[tuple[float, int, tuple[int, ...]]] = []
        said: set[int] = set()
        while said != set(found):
            for event in engine.step():
                said.add(event.index)
                text, total = found[event.index]
                grown += [
                    (total + top.logprob, event.index, (*text, top.token_id)) for top in event.logprobs[0].top
                ]
            engine.scheduler.check()
        best = sorted(grown, key=lambda beam: -beam[0])[:width]
        indices = engine.steer("b", [(index, text[-1]) for _, index, text in best])
        found = {index: (text, total) for index, (total, _, text) in zip(indices, best, strict=True)}
    engine.abort("b")
    assert engine.stats().blocks_used == 0
    return [text for text, _ in found.values()]


@pytest.mark.parametrize("config", [{}, {"kv_cache_memory_bytes": 24 * BLOCK_BYTES}, {"max_num_seqs": 2}])
def test_steered_beams_are_those_of_one_group(start: Start, config: dict[str, Any]) -> None:
    assert beams(start(MIXED, **config)) == beams(start(MIXED, whole=True))


def test_blocks_in_use_stay_bounded_as_the_context_grows(start: Start) -> None:
    engine = start(MIXED, enable_prefix_caching=False)
    sampling = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
    engine.add(Request(id="r", prompt_ids=tuple(PROMPTS[0] * 2), sampling=sampling, arrived_at=0.0))
    used = []
    while engine.has_work:
        plan = engine.plan()
        used.append([pool.num_used for pool in engine.scheduler.kv.pools])
        engine.run(plan)
    full, short, long = zip(*used, strict=True)
    assert max(full) == 19  # 300 tokens, of which the last is not computed
    # Windows of 9 and 20 and chunks of 32 tokens: 40 and 51 consecutive tokens in blocks of 16.
    assert (max(short), max(long)) == (4, 5)
    # One token at a time sees 9 and 20 tokens.
    assert (max(short[10:]), max(long[10:])) == (2, 3)
    assert engine.info.max_model_len == 512


def test_windows_leave_room_for_longer_contexts_and_say_what_they_take(start: Start) -> None:
    budget = 50 * BLOCK_BYTES
    whole = start(MIXED, whole=True, kv_cache_memory_bytes=budget)
    assert (whole.info.max_model_len, whole.info.kv_block_bytes) == (192, 4 * BLOCK_BYTES)
    # One layer keeps all, one holds 4 blocks, two 5 of two layers each.
    engine = start(MIXED, kv_cache_memory_bytes=budget)
    assert engine.info.max_model_len == 512
    sizes = [pool.num_blocks for pool in engine.scheduler.kv.pools]
    assert sizes[0] == 32
    stats = engine.stats()
    assert (stats.blocks_total, stats.blocks_free) == (sum(sizes), sum(sizes))
    taken = (sizes[0] + sizes[1] + 2 * sizes[2]) * BLOCK_BYTES
    assert taken <= budget
    assert stats.kv_block_bytes == taken // sum(sizes)
    prompt = PROMPTS[0] * 5
    assert len(run(engine, [prompt], max_tokens=None)["0", 0]) == 512 - len(prompt)
