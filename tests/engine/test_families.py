"""Each family against transformers, from the config.json of transformers 5 and of 4."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import BACKENDS, DENSE_FAMILIES, Part, SmallModel, read

from appliance.engine.spec import Activation, DecoderSpec, LayerSpec, RopeSpec

GOLDEN = Path(__file__).parents[1] / "golden"
SPELLINGS = ("config.json", "config.legacy.json")
ROWS = ((0, 24), (1, 17))

each_model = pytest.mark.parametrize("spelling", SPELLINGS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_family = pytest.mark.parametrize("family", DENSE_FAMILIES)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's model, by one of its spellings."""

    @cache
    def make(family: str, spelling: str, backend: str = "reference") -> SmallModel:
        folder = tmp_path_factory.mktemp(f"{family}-{backend}")
        (folder / "config.json").symlink_to(GOLDEN / f"arch_{family}" / spelling)
        (folder / "model.safetensors").symlink_to(GOLDEN / f"arch_{family}" / "model.safetensors")
        return SmallModel(folder, backend=backend)

    return make


@cache
def expected(family: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"arch_{family}" / "expected.safetensors")


def prompts(family: str) -> list[Part]:
    ids = expected(family)["input_ids"].tolist()
    return [Part(row, tuple(ids[row][:length])) for row, length in ROWS]


def worst(got: list[torch.Tensor], family: str) -> float:
    """The largest difference from transformers' logits, in tolerances.

    Both compute in float32; what is left is the order of sums over at most 96 terms, some two dozen times over.
    """
    logits = expected(family)["logits"]
    tolerance = 16 * torch.finfo(torch.float32).eps * 96**0.5 * float(logits.abs().max())
    return max(float((got[row] - logits[row, :length]).abs().max()) for row, length in ROWS) / tolerance


@each_backend
@each_family
@each_model
def test_logits_agree_with_transformers(model_of: Any, family: str, spelling: str, backend: str) -> None:
    assert worst(model_of(family, spelling, backend).run(prompts(family)), family) < 1


@each_backend
@each_family
@each_model
def test_chunks_and_strangers_change_no_bit(model_of: Any, family: str, spelling: str, backend: str) -> None:
    model = model_of(family, spelling, backend)
    first, second = prompts(family)
    whole = model.run([first, second])
    chunked = [model.run([Part(2, first.ids[at : at + 5], at)])[0] for at in range(0, len(first.ids), 5)]
    assert torch.equal(torch.cat(chunked), whole[0])
    strangers = [Part(number, tuple(range(3 + number, 3 + number + 7 * number))) for number in (3, 4, 5)]
    amid = model.run([strangers[0], second, strangers[1], first, strangers[2]])
    assert torch.equal(amid[3], whole[0])
    assert torch.equal(amid[1], whole[1])
    assert worst(whole, family) < 1


@each_backend
@each_family
@each_model
def test_greedy_tokens_are_transformers(model_of: Any, family: str, spelling: str, backend: str) -> None:
    model = model_of(family, spelling, backend)
    parts = prompts(family)
    told: list[list[int]] = [[], []]
    for _ in range(16):
        for row, logits in enumerate(model.run(parts)):
            told[row].append(int(logits[-1].argmax()))
        parts = [Part(p.sequence, (told[p.sequence][-1],), p.start + len(p.ids)) for p in parts]
    assert told == expected(family)["greedy"].tolist()


def without(rope: RopeSpec, **changes: Any) -> tuple[RopeSpec, ...]:
    return (replace(rope, **changes),)


def windows(spec: DecoderSpec, window: int) -> DecoderSpec:
    layers = tuple(LayerSpec(window if layer.window else 0, layer.rope) for layer in spec.layers)
    return replace(spec, layers=layers)


MISTAKES = {
    "gemma2": (
        lambda spec: replace(spec, attention_softcap=0.0),
        lambda spec: replace(spec, logits_softcap=0.0),
        lambda spec: replace(spec, attention_scale=spec.head_dim**-0.5),
        lambda spec: replace(spec, embed_scale=1.0),
        lambda spec: windows(spec, 9),
    ),
    "gemma3_text": (
        lambda spec: replace(spec, activation=Activation.GELU),
        lambda spec: replace(spec, ropes=(spec.ropes[1], spec.ropes[1])),
        lambda spec: replace(spec, ropes=(replace(spec.ropes[0], kind="default"), spec.ropes[1])),
        lambda spec: windows(spec, 7),
    ),
    "granite": (
        lambda spec: replace(spec, embed_scale=1.0),
        lambda spec: replace(spec, residual_scale=1.0),
        lambda spec: replace(spec, attention_scale=spec.head_dim**-0.5),
        lambda spec: replace(spec, logits_scale=1.0),
    ),
    "llama": (lambda spec: replace(spec, ropes=without(spec.ropes[0], kind="default")),),
    "mistral": (lambda spec: windows(spec, 9), lambda spec: windows(spec, 0)),
    "phi3": (
        lambda spec: replace(spec, ropes=without(spec.ropes[0], attention_factor=1.0)),
        lambda spec: replace(spec, ropes=without(spec.ropes[0], original_context=8)),
        lambda spec: replace(spec, ropes=without(spec.ropes[0], kind="default", rotary_dim=16)),
    ),
    "smollm3": (lambda spec: replace(spec, layers=(LayerSpec(),) * 4),),
}


@pytest.mark.parametrize(
    ("family", "mistake"),
    [(family, mistake) for family, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_wrong_constant_is_seen(family: str, mistake: Any) -> None:
    folder = GOLDEN / f"arch_{family}"
    model = SmallModel(folder, mistake(read(folder)))
    assert worst(model.run(prompts(family)), family) > 5


def test_gemma3_inside_a_model_that_sees(tmp_path: Path) -> None:
    """Its sizes in a section of their own, which leaves out what the class has by default."""
    source = GOLDEN / "arch_gemma3_text"
    text = json.loads((source / "config.legacy.json").read_text())
    del text["architectures"], text["tie_word_embeddings"], text["rms_norm_eps"]
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    whole = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
    whole["vision_tower.vision_model.head.weight"] = torch.ones(2, 2)
    save_file(whole, tmp_path / "model.safetensors")
    assert worst(SmallModel(tmp_path).run(prompts("gemma3_text")), "gemma3_text") < 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "smollm3"])
def test_a_head_that_is_tied_unless_the_file_says_otherwise(family: str, tmp_path: Path) -> None:
    config = json.loads((GOLDEN / f"arch_{family}" / "config.legacy.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(GOLDEN / f"arch_{family}" / "model.safetensors")
    assert read(tmp_path).tied_head
