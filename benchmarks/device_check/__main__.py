"""Whether the GPU's kernels and executor are right on a device, and how fast, in one run of at most eight minutes.

    python -m benchmarks.device_check --out FOLDER [--only NAME ...]
    python -m benchmarks.device_check --tiny --out FOLDER      # interpreted, on the CPU

From the root of a checkout; torch, triton, transformers, safetensors and numpy are all it needs. Prints a table, and
writes it and a JSON file to FOLDER. Ends with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.device_check.source_tree import use_checkout

# What times are held against, whatever else is wanted.
_BASIS = "bandwidth"
# Seconds, in all.
_LIMIT = 470.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="sections with one of these in their names")
    parser.add_argument(
        "--tiny", action="store_true", help="by Triton's interpreter, on the CPU, with tiny sizes"
    )
    args = parser.parse_args()
    if args.tiny:
        # Chosen when a kernel is decorated.
        os.environ["TRITON_INTERPRET"] = "1"
    use_checkout()
    return _check(args.out, args.only, tiny=args.tiny)


def _check(folder: Path, only: list[str] | None, *, tiny: bool) -> int:
    import torch

    from benchmarks.device_check.report import Found, problems, run_apart, save, table
    from benchmarks.device_check.sections import stages
    from benchmarks.device_check.sizes import FULL, TINY

    device, sizes = torch.device("cpu" if tiny else "cuda"), TINY if tiny else FULL
    start, found = time.monotonic(), dict[str, Found]()
    for limit_s, sections in stages(device, sizes, found):
        wanted = {
            name: section
            for name, section in sections.items()
            if not only or _BASIS in sections or any(each in name for each in only)
        }
        left_s = _LIMIT - (time.monotonic() - start)
        found.update(run_apart(wanted, device, min(limit_s, left_s)))
        print(f"{time.monotonic() - start:.0f} s:", *wanted, sep="\n    ", file=sys.stderr, flush=True)
        save(folder, found)
    print(table(found))
    wrong = problems(found)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
