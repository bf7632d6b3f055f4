"""Every golden model on each instruction set that this machine has, against the reference."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from small_models import DENSE_FAMILIES, Part, SmallModel, UnroundedWeights
from test_families_moe import FAMILIES
from test_model_golden import EXPECTED, MODELS, assert_close

from appliance.kernels.native import forced_isa

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (*MODELS, *EXPECTED, *(f"arch_{family}" for family in DENSE_FAMILIES), *FAMILIES)
PARTS = (Part(0, tuple(range(5, 38))), Part(1, tuple(range(50, 30, -1))), Part(2, (9,)))


def logits(name: str, backend: str) -> torch.Tensor:
    path = next((GOLDEN / name).glob("*.gguf"), GOLDEN / name)
    model = SmallModel(path, backend=backend, weights_type=UnroundedWeights)
    return torch.cat(model.run(list(PARTS)))


@cache
def reference(name: str) -> torch.Tensor:
    return logits(name, "reference")


@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references_on_every_instruction_set(name: str, isa: str) -> None:
    with forced_isa(isa) as there:
        if not there:
            pytest.skip(f"no {isa} here")
        assert_close(logits(name, "cpu"), reference(name))
