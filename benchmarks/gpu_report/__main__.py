"""The GPU's kernels compiled offline for each architecture: prints the table and where it is worse than the kept one.

    python -m benchmarks.gpu_report [--update] [--only NAME] [--architecture 86]

By the Triton that is imported, each having its table; `make gpu-report` runs the lowest and the highest of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import triton

from benchmarks.gpu_report.compile import ARCHITECTURES, Compiled, Variant, compile_variant
from benchmarks.gpu_report.linear import LINEAR
from benchmarks.gpu_report.steps import STEPS

# Every kernel's specialisations.
VARIANTS = [*LINEAR, *STEPS]
_KEPT = Path(__file__).with_name("kept.json")
_MORE_IS_BETTER = ("copies", "occupancy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="keep what was found")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, action="append")
    args = parser.parse_args()
    kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
    tables = kept.setdefault(triton.__version__, {})
    print(f"Triton {triton.__version__}\n{'':52}", *(f"{field.name:>12}" for field in fields(Compiled)))
    worse: list[str] = []
    for architecture in args.architecture or ARCHITECTURES:
        table = tables.setdefault(f"sm_{architecture}", {})
        if args.update:
            for name in [name for name in table if args.only in name]:
                del table[name]
        for variant in VARIANTS:
            if args.only not in variant.name or architecture not in variant.architectures:
                continue
            found = compile_variant(variant, architecture)
            print(f"sm_{architecture} {variant.name:46}", *(f"{each:>12}" for each in asdict(found).values()))
            worse += _limits(variant, found)
            if args.update:
                table[variant.name] = asdict(found)
            else:
                worse += _compared(f"sm_{architecture} {variant.name}", found, table.get(variant.name))
    if args.update:
        _KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    print(*worse, sep="\n")
    return bool(worse)


def _limits(variant: Variant, found: Compiled) -> Iterator[str]:
    if found.spills:
        yield f"{variant.name}: {found.spills} spills, expected none"
    if found.instructions > variant.most:
        yield f"{variant.name}: {found.instructions} instructions, expected {variant.most} at most"


def _compared(name: str, found: Compiled, kept: dict[str, Any] | None) -> Iterator[str]:
    if kept is None:
        yield f"{name}: not in the kept table; add it by --update"
        return
    for key, value in asdict(found).items():
        sign = -1 if key in _MORE_IS_BETTER else 1
        if value != kept[key] if isinstance(value, str) else sign * value > sign * kept[key]:
            yield f"{name}: {key} {value}, kept {kept[key]}"


if __name__ == "__main__":
    sys.exit(main())
