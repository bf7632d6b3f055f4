"""GGUF files that llama.cpp's converter made of the same models: the same weights, the same constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import DENSE_FAMILIES, read

from appliance.engine.errors import UnsupportedModelError
from appliance.engine.executors.rope_frequencies import rope_frequencies
from appliance.engine.families import read_spec
from appliance.engine.spec import DecoderSpec, LayerSpec, RopeSpec
from appliance.quant.checkpoint import open_checkpoint
from appliance.quant.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
each_family = pytest.mark.parametrize("family", DENSE_FAMILIES)
# What the files cannot say: llama.cpp scales by the head's size, and knows no windows of Mistral's.
UNSAID = {
    "gemma2": lambda spec: replace(spec, attention_scale=0.25),
    "gemma3_text": lambda spec: replace(spec, attention_scale=0.25),
    "mistral": lambda spec: replace(spec, layers=(LayerSpec(),) * 2),
}


def metadata_of(family: str) -> tuple[str, Mapping[str, Any], frozenset[str]]:
    with open_checkpoint(GOLDEN / "arch_gguf" / f"{family}.gguf") as checkpoint:
        return checkpoint.architecture, checkpoint.metadata, frozenset(checkpoint.names())


def spec_of(family: str, **changes: Any) -> DecoderSpec:
    architecture, metadata, names = metadata_of(family)
    return read_spec(architecture, {**metadata, **changes}, names)


@each_family
def test_weights_are_those_of_the_folder(family: str) -> None:
    with (
        open_checkpoint(GOLDEN / "arch_gguf" / f"{family}.gguf") as converted,
        open_checkpoint(GOLDEN / f"arch_{family}") as folder,
    ):
        assert sorted(converted.names()) == sorted(folder.names())
        for name in folder.names():
            expected = folder.read(name).dequantize()
            # Matrices are stored as float16, vectors as float32.
            expected = expected.half().float() if expected.dim() == 2 else expected
            assert torch.equal(converted.read(name).dequantize(), expected), name


@each_family
def test_constants_are_those_of_the_folder(family: str) -> None:
    # The converter writes no pattern of Gemma 3's windows; llama.cpp reads one all the same.
    changes = {"gemma3.attention.sliding_window_pattern": 3} if family == "gemma3_text" else {}
    got = spec_of(family, **changes)
    expected = UNSAID.get(family, lambda spec: spec)(read(GOLDEN / f"arch_{family}"))
    for ours, theirs in zip(got.ropes, expected.ropes, strict=True):
        for served in (16, 256):
            (a, a_factor), (b, b_factor) = rope_frequencies(ours, served), rope_frequencies(theirs, served)
            assert torch.allclose(a, b, rtol=1e-6, atol=0)
            assert a_factor == pytest.approx(b_factor, rel=1e-6)
    for constant in ("norm_eps", "attention_scale", "residual_scale"):
        # Stored as float32.
        assert getattr(got, constant) == pytest.approx(getattr(expected, constant), rel=1e-6)
    floats = {name: getattr(got, name) for name in ("norm_eps", "attention_scale", "residual_scale")}
    assert replace(expected, ropes=got.ropes, **floats) == got


def test_gemma3_windows() -> None:
    sixes = spec_of("gemma3_text", **{"gemma3.block_count": 12})
    assert [layer.window for layer in sixes.layers] == [8, 8, 8, 8, 8, 0] * 2
    assert [layer.rope for layer in sixes.layers] == [1, 1, 1, 1, 1, 0] * 2
    listed = spec_of("gemma3_text", **{"gemma3.attention.sliding_window_pattern": [False, True, True, False]})
    assert [layer.window for layer in listed.layers] == [0, 8, 8, 0]
    with pytest.raises(CheckpointError, match="sliding_window_pattern' has 1 entries, expected 4"):
        spec_of("gemma3_text", **{"gemma3.attention.sliding_window_pattern": [True]})


def test_the_largest_gemmas_scale_by_the_share_of_a_head() -> None:
    for family, layers in (("gemma2", 46), ("gemma3_text", 62)):
        name = family.removesuffix("_text")
        wide = {f"{name}.block_count": layers, f"{name}.embedding_length": 256}
        assert spec_of(family, **wide).attention_scale == 64**-0.5


def test_yarn_and_linear() -> None:
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    yarn |= {"qwen2.rope.scaling.original_context_length": 64}
    spec = spec_of("qwen2", **yarn)
    parameters = (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", 1.0))
    assert spec.ropes == (RopeSpec(1e6, 16, "yarn", 4.0, 64, 0.1 * 1.3862943611198906 + 1, parameters),)
    assert spec.context_len == 256
    linear = spec_of("qwen2", **{"qwen2.rope.scaling.factor": 2.0})
    assert (linear.ropes[0].kind, linear.ropes[0].factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"qwen2.expert_count": 8}, "qwen2.expert_count is 8"),
        ("qwen3", {"qwen3.attention.sliding_window": 512}, "qwen3.attention.sliding_window is 512"),
        ("olmo2", {"olmo2.attention.sliding_window": 4096}, "olmo2.attention.sliding_window is 4096"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "finetuned is False"),
        ("llama", {"llama.rope.scaling.type": "linear"}, "'linear' beside a tensor of RoPE's factors"),
        ("qwen2", {"qwen2.rope.scaling.type": "ntk"}, "type is 'ntk', which is not supported; what works"),
        ("smollm3", {"smollm3.rope.dimension_count": 8}, "dimension_count is 8; supported is the head size"),
    ],
)
def test_what_is_not_done_is_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(family, **changes)
