"""What a check has found, section by section; each section is a process of its own, with a time limit.

So an exception, a hanging kernel or a broken CUDA context costs one section, and what it had found until then stays.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        bound: of a time, the least that is possible; of an error (`is_error`), the most that is allowed.
    """

    what: str
    value: float
    unit: str
    bound: float | None = None
    is_error: bool = False

    @property
    def failed(self) -> bool:
        return self.is_error and not self.value <= (self.bound or 0)

    @property
    def verdict(self) -> str:
        if self.is_error:
            return "WRONG" if self.failed else "ok"
        return "" if self.bound is None or not self.value else f"{self.bound / self.value:.0%} of the floor"


def error(what: str, value: float, unit: str = "of the tolerance", bound: float = 1.0) -> Row:
    return Row(what, value, unit, bound, is_error=True)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Found:
    """Of a section: `failure` is a traceback or what else ended it early."""

    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0


Section = Callable[[], Iterator[Row]]


def run_apart(sections: Mapping[str, Section], device: torch.device, limit_s: float) -> dict[str, Found]:
    """Run sections side by side, each in a forked child, for no more than so many seconds."""
    fork, start = multiprocessing.get_context("fork"), time.monotonic()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for place, (name, section) in enumerate(sections.items()):
            lines = Path(folder) / str(place)
            children[name] = lines, fork.Process(target=_child, args=(section, device, lines))
            children[name][1].start()
        for name, (lines, child) in children.items():
            child.join(max(0.0, limit_s - (time.monotonic() - start)))
            hung = child.is_alive()
            if hung:
                child.kill()
                child.join()
            found[name] = _read(lines)
            if hung:
                found[name].failure = f"stopped after {limit_s:.0f} s"
            elif child.exitcode and not found[name].failure:
                found[name].failure = f"ended with {child.exitcode}"
    return found


def _child(section: Section, device: torch.device, lines: Path) -> None:
    with lines.open("w") as file:
        try:
            start = time.monotonic()
            torch.manual_seed(0)
            print(json.dumps({"facts": _facts(device)}), file=file, flush=True)
            for row in section():
                line = {"row": asdict(row), "seconds": time.monotonic() - start}
                print(json.dumps(line), file=file, flush=True)
        except BaseException:
            print(json.dumps({"failure": traceback.format_exc()}), file=file, flush=True)
            # Nothing that could hang over a broken context is tidied up.
            os._exit(1)
    os._exit(0)


def _facts(device: torch.device) -> dict[str, str]:
    facts = {"torch": torch.__version__, "triton": triton.__version__, "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{properties.name}, sm_{properties.major}{properties.minor}"
        facts["multiprocessors"] = str(properties.multi_processor_count)
        facts["cache"] = f"{properties.L2_cache_size >> 20} MiB"
        facts["memory"] = f"{properties.total_memory >> 20} MiB"
    return facts


def _read(lines: Path) -> Found:
    found = Found()
    for line in lines.read_text().splitlines() if lines.exists() else ():
        message = json.loads(line)
        if "row" in message:
            found.rows.append(Row(**message["row"]))
            found.seconds = message["seconds"]
        found.facts.update(message.get("facts", {}))
        found.failure = message.get("failure", found.failure)
    return found


def table(sections: dict[str, Found]) -> str:
    facts = {key: value for found in sections.values() for key, value in found.facts.items()}
    lines = ["; ".join(f"{key} {value}" for key, value in facts.items()), ""]
    for name, found in sections.items():
        lines += [f"## {name} ({found.seconds:.0f} s)", "", "| what | value | bound | |", "|-|-|-|-|"]
        for row in found.rows:
            bound = "" if row.bound is None else f"{row.bound:.4g}"
            lines.append(f"| {row.what} | {row.value:.4g} {row.unit} | {bound} | {row.verdict} |")
        if found.failure:
            lines += ["", "FAILED:", "", *(f"    {line}" for line in found.failure.splitlines())]
        lines.append("")
    return "\n".join(lines)


def save(folder: Path, sections: dict[str, Found]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device_check.md").write_text(table(sections), encoding="utf-8")
    found = {name: asdict(each) for name, each in sections.items()}
    (folder / "device_check.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def problems(sections: dict[str, Found]) -> Sequence[str]:
    return [
        f"{name}: {found.failure.splitlines()[-1]}" for name, found in sections.items() if found.failure
    ] + [
        f"{name}: {row.what}: {row.value:.4g} {row.unit}"
        for name, found in sections.items()
        for row in found.rows
        if row.failed
    ]
