"""Which native operations a family's step becomes. That they compute the same is what the tests of families say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import load_executor

from appliance.engine.executors import lowering
from appliance.kernels.runtime.model import NativeModel, Source

GOLDEN = Path(__file__).parents[1] / "golden"
OPERATIONS = (
    *("embed", "linear", "norm", "add", "add_normed", "gated"),
    *("finish_qkv", "attend", "route", "experts", "head", "finish"),
)
KINDS = ("plain", "normed", "gated")

QKV = "finish_qkv rope"
DENSE = ["linear normed", QKV, "attend", "linear plain added", "linear normed", "linear gated added"]
# Of a layer each.
LAYERS = {
    "llama": DENSE,
    "gemma2": [
        *("linear normed", QKV, "attend", "linear plain", "add_normed"),
        *("linear normed", "linear gated", "add_normed"),
    ],
    # The residual stream itself is what products read.
    "olmo2": [
        *("linear plain", "finish_qkv whole norms rope", "attend", "linear plain", "add_normed"),
        *("linear plain", "linear gated", "add_normed"),
    ],
    # Two operations read the normed rows, so they are made once and kept.
    "qwen3_moe": [
        *("linear normed", "finish_qkv norms rope", "attend", "linear plain added"),
        *("norm", "linear plain", "route", "experts plain added"),
    ],
    "gpt_oss": [
        *("linear normed", QKV, "attend", "linear plain added"),
        *("norm", "linear plain", "route", "experts plain added"),
    ],
}


def described(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    words = [name, *(KINDS[arg.kind] for arg in args[:1] if isinstance(arg, Source))]
    if name == "finish_qkv":
        *_, norms, rope = args
        if norms is not None:
            words += ["whole", "norms"] if norms[3] else ["norms"]
        words += ["rope"] if rope is not None else []
    return " ".join([*words, "added"] if options.get("factor") is not None else words)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that native models are given from here on."""
    found: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        def method(model: NativeModel, *args: Any, **options: Any) -> Any:
            found.append(described(name, args, options))
            return getattr(NativeModel, name)(model, *args, **options)

        return method

    model = type("Recorded", (NativeModel,), {name: recorded(name) for name in OPERATIONS})
    monkeypatch.setattr(lowering, "NativeModel", model)
    return found


@pytest.mark.parametrize("family", LAYERS)
def test_operations_of_every_layer(family: str, told: list[str]) -> None:
    load_executor(GOLDEN / f"arch_{family}", "cpu")
    layers, left = divmod(len(told) - 3, len(LAYERS[family]))
    assert (told[0], told[-2:], left) == ("embed", ["head normed", "finish"], 0)
    assert told[1:-2] == LAYERS[family] * layers


def test_a_layer_without_positions(told: list[str]) -> None:
    load_executor(GOLDEN / "arch_smollm3", "cpu")
    rope = [operation == QKV for operation in told if operation.startswith("finish_qkv")]
    assert rope == [True, True, True, False]
