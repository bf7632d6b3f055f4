"""Which backend is taken, what it keeps keys and values in, and what it refuses."""

from __future__ import annotations

import pytest

from appliance.engine.backends import (
    NO_GPU,
    Backend,
    GpuFault,
    activation_dtype,
    choose_backend,
    gpu_note,
    kv_dtype,
    precision_note,
)
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


OLD_GPU = GpuFault("RTX 2080: compute capability 7.5, 8.0 is needed; take another GPU", present=True)


@pytest.mark.parametrize(
    ("backend", "device", "fault", "chosen"),
    [
        ("auto", "auto", None, Backend.GPU),
        ("auto", "cuda:1", None, Backend.GPU),
        ("gpu", "auto", None, Backend.GPU),
        ("gpu", "cuda", None, Backend.GPU),
        ("auto", "auto", OLD_GPU, Backend.CPU),
        ("auto", "auto", NO_GPU, Backend.CPU),
        ("auto", "cpu", None, Backend.CPU),
        ("cpu", "auto", None, Backend.CPU),
        ("cpu", "cpu", None, Backend.CPU),
        ("reference", "auto", None, Backend.REFERENCE),
    ],
)
def test_a_gpu_is_taken_where_one_can_be_used_and_nobody_minds(
    backend: str, device: str, fault: GpuFault | None, chosen: Backend
) -> None:
    assert choose_backend(config(backend=backend, device=device), True, fault) is chosen


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "gpu"}, f"backend is gpu, but {OLD_GPU.line}"),
        ({"device": "cuda:1"}, f"device is cuda:1, but {OLD_GPU.line}"),
        (
            {"backend": "gpu", "device": "cpu"},
            "backend is gpu, but device is cpu; leave one of them at auto",
        ),
        (
            {"backend": "cpu", "device": "cuda"},
            "backend is cpu, but device is cuda; leave one of them at auto",
        ),
        (
            {"backend": "reference", "device": "cuda:0"},
            "backend is reference, but device is cuda:0; leave one of them at auto",
        ),
    ],
)
def test_who_asks_for_a_gpu_gets_one_or_the_reason(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BackendError) as error:
        choose_backend(config(**settings), True, OLD_GPU)
    assert str(error.value) == message


def test_a_gpu_that_is_there_and_unused_is_said_unless_nobody_wants_it() -> None:
    said = f"{OLD_GPU.line}; running on the cpu backend"
    assert gpu_note(config(), Backend.CPU, OLD_GPU) == said
    assert gpu_note(config(), Backend.CPU, NO_GPU) == ""
    assert gpu_note(config(), Backend.GPU, None) == ""
    assert gpu_note(config(backend="cpu"), Backend.CPU, OLD_GPU) == ""
    assert gpu_note(config(device="cpu"), Backend.CPU, OLD_GPU) == ""


@pytest.mark.parametrize(
    ("backend", "interpreted", "auto", "offered", "refused", "message"),
    [
        (
            Backend.GPU,
            False,
            "bfloat16",
            ["bfloat16", "float16"],
            "float32",
            "bfloat16 or float16; choose one",
        ),
        (Backend.GPU, True, "float16", ["float16"], "bfloat16", "float16; leave dtype at auto"),
        (Backend.CPU, False, "float32", ["float32"], "bfloat16", "float32; leave dtype at auto"),
        (Backend.REFERENCE, False, "float32", ["float32"], "float16", "float32; leave dtype at auto"),
    ],
)
def test_each_backend_computes_in_what_it_can(
    backend: Backend, interpreted: bool, auto: str, offered: list[str], refused: str, message: str
) -> None:
    assert activation_dtype(config(), backend, interpreted) == auto
    assert [activation_dtype(config(dtype=name), backend, interpreted) for name in offered] == offered
    with pytest.raises(BackendError) as error:
        activation_dtype(config(dtype=refused), backend, interpreted)
    assert str(error.value).startswith(
        f"dtype is {refused}, but the {backend.value} backend computes in {message}"
    )


def test_a_gpu_keeps_keys_and_values_in_what_it_computes_in() -> None:
    assert kv_dtype(config(dtype="float16"), Backend.GPU) == "float16"
    assert kv_dtype(config(), Backend.GPU, interpreted=True) == "float16"
    with pytest.raises(BackendError, match="the gpu backend keeps float16 or int8; choose one of these"):
        kv_dtype(config(kv_cache_dtype="bfloat16"), Backend.GPU, interpreted=True)


@pytest.mark.parametrize(
    ("backend", "auto", "kept", "refused"),
    [
        (Backend.CPU, "bfloat16", ["float32", "bfloat16", "int8"], "float16"),
        (Backend.GPU, "bfloat16", ["bfloat16", "float16", "int8"], "float32"),
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
    assert precision_note(wish, Backend.GPU).startswith("activation_precision asks for bf16")
    assert precision_note(config(), Backend.GPU) == ""
    assert precision_note(config(), Backend.REFERENCE) == ""
    assert precision_note(config(activation_precision="float32"), Backend.REFERENCE) == ""


def test_a_gpu_computes_in_what_the_checkpoint_was_made_in_unless_told() -> None:
    def both(made_in: str, backend: Backend = Backend.GPU, **settings: str) -> tuple[str, str]:
        given = EngineConfig(model_path="m", **settings)
        return tuple(f(given, backend, False, made_in) for f in (activation_dtype, kv_dtype))

    assert both("float16") == ("float16", "float16")
    assert both("float32") == both("") == ("bfloat16", "bfloat16")
    assert both("float16", dtype="bfloat16", kv_cache_dtype="int8") == ("bfloat16", "int8")
    assert both("float16", Backend.CPU) == ("float32", "bfloat16")
    assert activation_dtype(EngineConfig(model_path="m"), Backend.GPU, True, "bfloat16") == "float16"
