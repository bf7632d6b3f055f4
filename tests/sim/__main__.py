"""`PYTHONPATH=tests python -m sim --seeds 50 --steps 10000`: many seeds, one by one, and what they measured."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import msgspec

from appliance.engine.sampling_params import SamplingParams
from sim.checks import Figures
from sim.replay import SimulationError, shrink, simulate
from sim.traffic import Action, Arrive, make_settings


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
                    print(f"before step {step}: {_brief(action)}")
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


def _brief(action: Action) -> str:
    if not isinstance(action, Arrive):
        return repr(action)
    request = action.request
    default, given = (msgspec.structs.asdict(each) for each in (SamplingParams(), request.sampling))
    sampling = {name: value for name, value in given.items() if value != default[name]}
    beams = f", {action.beam_width} beams of {action.beam_length}, thinking {action.steering_delay} steps"
    return (
        f"Arrive {request.id}: {len(request.prompt_ids)} tokens {request.prompt_ids}, priority {request.priority}, "
        f"arrived_at {request.arrived_at}, seed {action.seed}, {sampling}{beams if request.is_steered else ''}"
    )


if __name__ == "__main__":
    sys.exit(main())
