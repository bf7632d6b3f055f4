"""The project out of its checkout, on a machine where it is not installed and not all it needs is there.

Installed, `engine/`, `quant/` and `kernels/` are parts of the package `appliance` (pyproject.toml says so). In the
checkout they stand beside it, so `appliance` is told to look for its parts there too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


def use_checkout() -> None:
    """Make `appliance` and its parts importable, and helpers of the tests."""
    if importlib.util.find_spec("msgspec") is None:
        sys.modules["msgspec"] = _plain_records()
    package = importlib.import_module("appliance")
    if importlib.util.find_spec("appliance.engine") is None:
        package.__path__.append(str(ROOT))
    sys.path.append(str(ROOT / "tests" / "quant"))


def _plain_records() -> ModuleType:
    """In place of msgspec, whose records the engine's nouns are; here none leaves the process or comes from outside."""

    class Struct:
        def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_options: bool) -> None:
            for name in inspect.get_annotations(cls):
                if isinstance(vars(cls).get(name), dict):
                    setattr(cls, name, field(default_factory=dict))
            dataclass(frozen=frozen, kw_only=kw_only)(cls)

    module = ModuleType("msgspec")
    vars(module).update(
        Struct=Struct,
        structs=SimpleNamespace(force_setattr=object.__setattr__, fields=lambda _record: ()),
    )
    return module
