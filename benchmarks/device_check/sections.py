"""The sections of the check, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.report import Found, Row, Section, short
from benchmarks.device_check.sizes import Sizes

_MODEL_SHARES = 4
# What is measured, one after the other: of which module, and how many seconds each may take.
_MEASURED = {
    "products": ("speed", 90),
    "model": ("model", 90),
    "torch model": ("torch_model", 30),
    "attention": ("attention", 60),
    "row kernels": ("speed", 30),
}


def stages(
    device: torch.device, sizes: Sizes, found: Mapping[str, Found]
) -> Iterator[tuple[int, dict[str, Section]]]:
    """Sections that may run side by side, and how many seconds they may take.

    Args:
        found: filled while stages run, with what the ones before have found.
    """
    yield 45, {"bandwidth": _section("bandwidth", "bandwidth", device, sizes)}
    yield 120, _checks(device, sizes)
    peaks = Peaks.of({row.what: row for row in found["bandwidth"].rows})
    for name, (module, limit_s) in _MEASURED.items():
        yield limit_s, {name: _section(module, name.replace(" ", "_"), device, sizes, peaks)}
    yield 20, {"swap": _section("swap", "swap", device, sizes)}


def _checks(device: torch.device, sizes: Sizes) -> dict[str, Section]:
    """Most of their time goes into compiling, which is done in one thread of each."""
    shares = min(_MODEL_SHARES, len(sizes.models))
    checks = {"products": "parity", "rows": "parity", "attention": "attention"}
    found: dict[str, Section] = {}
    for dtype in sizes.dtypes:
        for name, module in checks.items():
            section = _section(module, f"{name}_parity", device, sizes, dtype)
            found[f"parity of {name}, {short(dtype)}"] = section
        for share in range(shares):
            section = _section("quality", "quality", device, sizes, dtype, share, shares)
            found[f"parity of models, {short(dtype)}, {share + 1}"] = section
        # Triton keeps what it has compiled, and the measurement that follows finds it.
        if device.type == "cuda":
            once = replace(sizes, dtypes=(dtype,), repeats=1)
            section = _section("speed", "products", device, once, Peaks())
            found[f"compiling, {short(dtype)}"] = partial(_silently, section)
    return found


def _section(module: str, function: str, *args: Any) -> Section:
    """Imported where it runs, so that what is broken in one costs no other."""

    def run() -> Iterator[Row]:
        yield from getattr(importlib.import_module(f"benchmarks.device_check.{module}"), function)(*args)

    return run


def _silently(section: Section) -> Iterator[Row]:
    for _ in section():
        pass
    yield from ()
