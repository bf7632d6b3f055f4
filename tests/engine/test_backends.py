"""Which backend is taken, what it keeps keys and values in, and what it refuses."""

from __future__ import annotations

import pytest

from appliance.engine.backends import Backend, choose_backend, kv_dtype, precision_note
from appliance.engine.config import EngineConfig
from appliance.engine.errors import BackendError


def config(**settings: str) -> EngineConfig:
    return EngineConfig(model_path="/m", **settings)


@pytest.mark.parametrize(
    ("asked", "library_built", "chosen"),
    [
        ("auto", True, Backend.CPU),
        ("auto", False, Backend.REFERENCE),
        ("cpu", True, Backend.CPU),
        ("reference", True, Backend.REFERENCE),
        ("reference", False, Backend.REFERENCE),
    ],
)
def test_the_kernels_are_taken_where_they_are(asked: str, library_built: bool, chosen: Backend) -> None:
    assert choose_backend(config(backend=asked), library_built) is chosen


def test_kernels_that_were_not_built_are_refused_with_what_to_do() -> None:
    with pytest.raises(BackendError) as error:
        choose_backend(config(backend="cpu"), library_built=False)
    assert str(error.value) == (
        "backend is cpu, but the native kernels were not built, as there was no C++ compiler at install; "
        "reinstall with g++ or clang, or leave backend at auto to compute with torch, much slower"
    )


@pytest.mark.parametrize(
    ("backend", "auto", "kept", "refused"),
    [
        (Backend.CPU, "bfloat16", ["float32", "bfloat16", "int8"], "float16"),
        (Backend.REFERENCE, "float32", ["float32", "bfloat16", "float16"], "int8"),
    ],
)
def test_each_backend_keeps_what_it_can(backend: Backend, auto: str, kept: list[str], refused: str) -> None:
    assert kv_dtype(config(), backend) == auto
    assert [kv_dtype(config(kv_cache_dtype=name), backend) for name in kept] == kept
    with pytest.raises(
        BackendError, match=f"^kv_cache_dtype is {refused}, but the {backend.value} backend keeps "
    ):
        kv_dtype(config(kv_cache_dtype=refused), backend)


def test_a_precision_that_changes_nothing_is_said() -> None:
    wish = config(activation_precision="bf16")
    assert precision_note(wish, Backend.REFERENCE).startswith("activation_precision asks for bf16")
    assert precision_note(wish, Backend.CPU) == ""
    assert precision_note(config(), Backend.REFERENCE) == ""
    assert precision_note(config(activation_precision="float32"), Backend.REFERENCE) == ""
