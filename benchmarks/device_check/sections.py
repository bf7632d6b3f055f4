"""The sections of the check, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.device_check.attention import attention_parity, attention_speed
from benchmarks.device_check.bandwidth import Peaks, bandwidth
from benchmarks.device_check.model import model, torch_model
from benchmarks.device_check.parity import product_parity, row_parity, short
from benchmarks.device_check.quality import quality
from benchmarks.device_check.report import Found, Row, Section
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.speed import products, row_kernels
from benchmarks.device_check.swap import swap

_MODEL_SHARES = 4
# What is measured, one after the other, and how many seconds each may take.
_MEASURED = {
    "products": (products, 90),
    "model": (model, 90),
    "torch model": (torch_model, 30),
    "attention": (attention_speed, 60),
    "row kernels": (row_kernels, 30),
}


def stages(
    device: torch.device, sizes: Sizes, found: Mapping[str, Found]
) -> Iterator[tuple[int, dict[str, Section]]]:
    """Sections that may run side by side, and how many seconds they may take.

    Args:
        found: filled while stages run, with what the ones before have found.
    """
    yield 45, {"bandwidth": partial(bandwidth, device, sizes)}
    yield 120, _checks(device, sizes)
    peaks = Peaks.of({row.what: row for row in found["bandwidth"].rows})
    for name, (measure, limit_s) in _MEASURED.items():
        yield limit_s, {name: partial(measure, device, sizes, peaks)}
    yield 20, {"swap": partial(swap, device, sizes)}


def _checks(device: torch.device, sizes: Sizes) -> dict[str, Section]:
    """Most of their time goes into compiling, which is done in one thread of each."""
    shares = min(_MODEL_SHARES, len(sizes.models))
    checks = (("products", product_parity), ("rows", row_parity), ("attention", attention_parity))
    found: dict[str, Section] = {}
    for dtype in sizes.dtypes:
        for name, check in checks:
            found[f"parity of {name}, {short(dtype)}"] = partial(check, device, sizes, dtype)
        for share in range(shares):
            section = partial(quality, device, sizes, dtype, share, shares)
            found[f"parity of models, {short(dtype)}, {share + 1}"] = section
        # Triton keeps what it has compiled, and the measurement that follows finds it.
        if device.type == "cuda":
            once = replace(sizes, dtypes=(dtype,), repeats=1)
            found[f"compiling, {short(dtype)}"] = partial(_silently, partial(products, device, once, Peaks()))
    return found


def _silently(section: Section) -> Iterator[Row]:
    for _ in section():
        pass
    yield from ()
