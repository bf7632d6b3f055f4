"""`PYTHONPATH=tests python -m sim --seeds 50 --steps 10000`: many seeds, one by one, and what they measured."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from sim.checks import Figures
from sim.replay import SimulationError, shrink, simulate
from sim.traffic import make_settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10_000, help="of each seed (default: %(default)s)")
    parser.add_argument("--shrink", action="store_true", help="find the least that makes a failing seed fail")
    options = parser.parse_args()
    total = Figures()
    for seed in range(options.first, options.first + options.seeds):
        start = time.perf_counter()
        try:
            figures = simulate(seed, options.steps)
        except SimulationError as error:
            print(error)
            if options.shrink:
                for step, action in shrink(make_settings(seed), error.notes, error.step + 1):
                    print(f"before step {step}: {action}")
                return 1
            raise
        total.add(figures)
        print(f"seed {seed}: {time.perf_counter() - start:.1f} s, {_describe(figures)}", flush=True)
    print(f"all {options.seeds} seeds hold: {_describe(total)}")
    return 0


def _describe(figures: Figures) -> str:
    values = dataclasses.asdict(figures)
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


if __name__ == "__main__":
    sys.exit(main())
