"""What each setting of the engine does to a loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import EXACT

from appliance.engine.config import EngineConfig
from appliance.engine.engine import Engine
from appliance.engine.errors import (
    BackendError,
    ContextLengthError,
    MemoryPlanError,
    UnsupportedModelError,
)
from appliance.engine.machine import available_memory
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import Request

# layers · (k, v) · kv heads · tokens · head_dim · float32
BLOCK_BYTES = 1 * 2 * 2 * 16 * 32 * 4
PROMPT = tuple(5 + 7 * index % 120 for index in range(40))


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "gguf_q4_0" / "mini-q4_0.gguf")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(model: str, **config: Any) -> Engine:
    return Engine(EngineConfig(model_path=model, **{**EXACT, **config}))


def run(engine: Engine, count: int = 1, **sampling: Any) -> list[tuple[int, ...]]:
    """The ids that `count` requests without a seed get, in the order of the requests."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "ignore_eos": True, **sampling})
    for index in range(count):
        engine.add(Request(id=str(index), prompt_ids=PROMPT, sampling=params, arrived_at=index))
    texts: dict[str, tuple[int, ...]] = {str(index): () for index in range(count)}
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.token_ids
    return list(texts.values())


# Of int8, 32 bytes of a token and head, and the scale.
@pytest.mark.parametrize(
    ("backend", "dtype", "share"),
    [
        ("reference", "auto", 1),
        ("reference", "float32", 1),
        ("reference", "bfloat16", 1 / 2),
        ("reference", "float16", 1 / 2),
        ("cpu", "auto", 1 / 2),
        ("cpu", "float32", 1),
        ("cpu", "bfloat16", 1 / 2),
        ("cpu", "int8", (32 + 4) / (32 * 4)),
    ],
)
def test_kv_cache_dtype_is_what_a_block_is_made_of(
    backend: str, dtype: str, share: float, model: str
) -> None:
    engine = start(model, backend=backend, kv_cache_dtype=dtype)
    assert engine.info.backend == backend
    assert engine.info.kv_block_bytes == BLOCK_BYTES * share


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", "bfloat16"), ("reference", "float16"), ("cpu", "bfloat16"), ("cpu", "int8")],
)
def test_in_fewer_bits_the_text_depends_on_nothing_else_either(backend: str, dtype: str, model: str) -> None:
    settings = {"backend": backend, "kv_cache_dtype": dtype, "activation_precision": "int8"}
    alone = run(start(model, **settings, enable_prefix_caching=False), seed=3)
    chunked = start(model, **settings, max_num_batched_tokens=16, max_num_seqs=4)
    assert run(chunked, 3, seed=3) == alone * 3


def test_what_a_backend_cannot_keep_is_refused_by_name(model: str) -> None:
    with pytest.raises(BackendError, match="kv_cache_dtype is float16, but the cpu backend keeps"):
        start(model, kv_cache_dtype="float16")
    with pytest.raises(BackendError, match="kv_cache_dtype is int8, but the reference backend keeps"):
        start(model, kv_cache_dtype="int8", backend="reference")


def test_heads_that_the_native_kernels_cannot_take_are_refused_before_anything_is_read(
    golden: Path, tmp_path: Path
) -> None:
    """A Llama whose only head has 1,024 elements."""
    config = json.loads((golden / "arch_llama" / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 128, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    shapes = {f"self_attn.{name}_proj": (1024, 32) for name in "qkv"} | {"self_attn.o_proj": (32, 1024)}
    shapes |= {f"mlp.{name}_proj": (32, 32) for name in ("gate", "up", "down")}
    shapes |= {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
    tensors = {f"model.layers.0.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.ones(128, 32), "model.norm.weight": torch.ones(32)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    told: list[int] = []
    with pytest.raises(UnsupportedModelError, match=r"heads of 1024 elements.*up to 512; set backend to"):
        Engine(EngineConfig(model_path=str(tmp_path)), lambda done, _total: told.append(done))
    assert told == []
    assert len(run(start(str(tmp_path), backend="reference"))[0]) == 12


@pytest.mark.parametrize(("backend", "auto"), [("reference", "float32"), ("cpu", "bfloat16")])
def test_16_bits_are_rounded_and_32_are_not(backend: str, auto: str, model: str) -> None:
    def logprobs(dtype: str) -> list[float]:
        engine = start(model, backend=backend, kv_cache_dtype=dtype)
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
        engine.add(Request(id="0", prompt_ids=PROMPT, sampling=params, arrived_at=0))
        found: list[float] = []
        while engine.has_work:
            for event in engine.step():
                found += [position.token.logprob for position in event.logprobs]
        return found

    exact, rounded = logprobs("float32"), logprobs("bfloat16")
    assert logprobs("auto") == {"float32": exact, "bfloat16": rounded}[auto]
    assert rounded != exact
    # Keys and values differ by 2^-9 of themselves; logits of this model are of the order of 1.
    assert rounded[0] == pytest.approx(exact[0], abs=0.05)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_size_is_how_many_tokens_a_block_has(block_size: int, model: str) -> None:
    engine = start(model, block_size=block_size, kv_cache_memory_bytes=64 * BLOCK_BYTES)
    assert engine.info.kv_block_bytes == BLOCK_BYTES // 16 * block_size
    assert engine.info.num_blocks == 64 * 16 // block_size
    texts = run(engine, 2, seed=3)
    assert texts == run(start(model), 2, seed=3)


def test_a_seed_makes_requests_without_one_repeatable(model: str) -> None:
    first = run(start(model, seed=42), 3)
    assert run(start(model, seed=42, max_num_seqs=1), 3) == first
    assert len(set(first)) == 3
    assert run(start(model, seed=43), 3) != first
    assert run(start(model), 3) != run(start(model), 3)


def share_of(num_blocks: int) -> float:
    """The gpu_memory_utilization that is as much as so many blocks, on this machine and now."""
    return num_blocks * BLOCK_BYTES / available_memory()


def test_gpu_memory_utilization_bounds_a_planned_pool(model: str) -> None:
    with pytest.raises(MemoryPlanError, match="gpu_memory_utilization"):
        start(model, gpu_memory_utilization=1e-9)
    given = start(model, gpu_memory_utilization=1e-9, kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert given.info.num_blocks == 5
    # So many sequences that a pool for all of them is larger than either share. Other programs free and take
    # memory between the two readings.
    sizes = [
        start(model, gpu_memory_utilization=share_of(blocks), max_num_seqs=1024).info.num_blocks
        for blocks in (8000, 2000)
    ]
    assert sizes == pytest.approx([8000, 2000], rel=0.2)


def test_a_smaller_share_of_the_memory_holds_less_at_once(model: str) -> None:
    engine = start(model, gpu_memory_utilization=share_of(6), enable_prefix_caching=False)
    # 40 tokens and an answer of 12 take four blocks; a request that is longer than the pool is refused.
    assert 4 <= engine.info.num_blocks <= 7
    assert engine.info.max_model_len == engine.info.num_blocks * 16
    assert "instead of 512" in engine.info.notes[0]
    with pytest.raises(ContextLengthError, match="serves a context of"):
        engine.add(Request(id="long", prompt_ids=PROMPT * 3, sampling=SamplingParams(), arrived_at=0))
    ample = start(model)
    assert run(engine, 3, seed=3) == run(ample, 3, seed=3)
    # Requests take turns that could have run together.
    assert engine.stats().steps_total > ample.stats().steps_total


def test_swap_space_is_said_to_be_unused(model: str) -> None:
    (note,) = start(model, swap_space=4.0).info.notes
    assert note.startswith("swap_space asks for 4 GiB")
    assert note.endswith("preempted requests are computed again")
    assert start(model, swap_space=0.0).info.notes == ()


@pytest.mark.parametrize("wish", ["gguf", "GGUF", "q4_0", None])
def test_a_quantization_that_the_tensors_have_is_no_news(wish: str | None, model: str) -> None:
    assert start(model, quantization=wish).info.notes == ()


def test_a_quantization_that_they_do_not_have_is_said_with_both(model: str) -> None:
    (note,) = start(model, quantization="awq").info.notes
    assert note == "quantization asks for awq, but the tensors are GGUF Q4_0, F32: the tensors decide"


def test_num_threads(model: str) -> None:
    start(model, num_threads=1)
    assert torch.get_num_threads() == 1


def test_max_num_seqs_bounds_the_requests_in_a_step(model: str) -> None:
    engine = start(model, max_num_seqs=2)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for index in range(5):
        engine.add(Request(id=str(index), prompt_ids=PROMPT, sampling=params, arrived_at=index))
    rows = []
    while engine.has_work:
        plan = engine.plan()
        rows.append(len(plan.rows))
        engine.run(plan)
    assert max(rows) == 2


def test_max_num_batched_tokens_bounds_the_tokens_of_a_step(model: str) -> None:
    engine = start(model, max_num_batched_tokens=16, max_num_seqs=16)
    engine.add(Request(id="0", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=1), arrived_at=0))
    tokens = []
    while engine.has_work:
        plan = engine.plan()
        tokens.append(plan.n_tokens)
        engine.run(plan)
    assert tokens == [16, 16, 8]
    assert start(model, max_num_batched_tokens=16, max_num_seqs=20).info.max_num_batched_tokens == 20


def test_enable_prefix_caching(model: str) -> None:
    def hits(engine: Engine) -> int:
        run(engine)
        run(engine)
        return engine.stats().prefix_hit_tokens_total

    assert hits(start(model)) == 32
    assert hits(start(model, enable_prefix_caching=False)) == 0


def test_max_model_len_is_served_and_said_where_it_is_more_than_the_model_has(model: str) -> None:
    assert start(model, max_model_len=48).info.max_model_len == 48
    engine = start(model, max_model_len=100_000)
    assert engine.info.max_model_len == engine.info.model_context_len
    assert "max_model_len asks for 100000" in engine.info.notes[0]


@pytest.mark.parametrize(("asked", "served"), [(None, 64), (50, 50), (64, 64), (200, 200), (999, 256)])
def test_frequencies_for_long_contexts_are_served_when_asked_for(
    asked: int | None, served: int, golden: Path
) -> None:
    engine = start(str(golden / "arch_phi3"), max_model_len=asked, kv_cache_memory_bytes=2**24)
    assert engine.info.max_model_len == served
