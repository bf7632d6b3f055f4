"""What kernels are compiled for does not change from step to step, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_families import pack_family
from small_models import load_executor, read
from triton.runtime.interpreter import InterpretedFunction

from appliance.engine.kv_groups import kv_groups
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow

Launch = tuple[InterpretedFunction, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    run = InterpretedFunction.run

    def recorded(kernel: InterpretedFunction, *args: Any, **options: Any) -> Any:
        found.append((kernel, args, options))
        return run(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return found


def specialised(launch: Launch) -> Iterator[tuple[str, object]]:
    """What Triton looks at of arguments: pointers' types and alignment; numbers, multiples of 16 being alike."""
    kernel, args, options = launch
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    left_out = kernel.kwargs["do_not_specialize"] or ()
    for name in kernel.arg_names:
        value = values[name]
        if isinstance(value, torch.Tensor):
            yield name, (value.dtype, value.data_ptr() % 16)
        elif name not in left_out:
            yield name, 16 if isinstance(value, int) and value % 16 == 0 else value


# Of one kind of experts' tiles each, and of products'.
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize(
    "sizes", [((1, 1, 1), (1,) * 7), ((21, 1), (29, 1, 1))], ids=["decoding", "with a prompt"]
)
def test_numbers_that_change_are_not_compiled_for(
    family: str, sizes: tuple[tuple[int, ...], ...], launches: list[Launch], tmp_path: Path
) -> None:
    packed, _ = pack_family(family, tmp_path)
    executor = load_executor(packed, "gpu", kv_dtype="float16")
    groups = len(kv_groups(read(packed), torch.float16))
    steps = []
    for counts in sizes:
        launches.clear()
        tables = [((2 * place, 2 * place + 1),) * groups for place in range(len(counts))]
        rows = [
            PlanRow(str(place), (5,) * count, place, table, True, SamplingParams(), (0,))
            for place, (count, table) in enumerate(zip(counts, tables, strict=True))
        ]
        executor.run(rows, range(len(counts)))
        steps.append(list(launches))
    first, second = steps
    assert len(first) == len(second) > 20
    for one, other in zip(first, second, strict=True):
        assert one[0] is other[0]
        changed = dict(set(specialised(one)) ^ set(specialised(other)))
        assert not changed, f"{one[0].__name__} would be compiled anew"
