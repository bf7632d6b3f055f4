"""Random traffic through the real scheduler and pools; `PYTHONPATH=tests python -m sim` runs far more of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.engine.types import BlockCopy, BlockRef
from sim.memory import Memory
from sim.replay import shrink_list, simulate
from sim.traffic import NotedTraffic, RandomTraffic, make_settings
from sim.world import World

STEPS = 1500


@pytest.mark.parametrize("seed", range(8))
def test_all_that_must_hold_of_every_step_does(seed: int) -> None:
    assert simulate(seed, STEPS).requests > 50


def test_one_of_the_seeds_is_long_enough_to_measure_waste_by() -> None:
    assert simulate(7, 300).mean_tokens >= 256


def test_what_was_noted_down_happens_again() -> None:
    settings = make_settings(4)
    first = World(settings, RandomTraffic(4, settings))
    first.run(400)
    again = World(settings, NotedTraffic(first.notes))
    again.run(400)
    assert first.figures.preemptions > 0
    assert again.figures == first.figures


def test_shrinking_leaves_what_a_failure_needs() -> None:
    assert shrink_list(range(100), lambda some: {3, 40, 41, 97} <= set(some)) == [3, 40, 41, 97]


def test_copies_are_made_in_their_order_and_before_lost_blocks_are_poisoned() -> None:
    memory = Memory(block_size=1)
    pool = memory.make_pool(0, "device", 3, caching=False)
    refs = [BlockRef(0, "device", block_id) for block_id in range(3)]
    pool.allocate(3)
    memory.settle()
    memory.blocks[refs[0]], memory.blocks[refs[2]] = [7], [9]
    pool.release([0, 1, 2])
    memory.settle([BlockCopy(refs[0], refs[1]), BlockCopy(refs[2], refs[0])])
    assert [memory.blocks[ref] for ref in refs] == [[9], [7], [-1]]


def test_it_needs_no_torch() -> None:
    code = "import sys, sim.__main__; sys.exit('torch' in sys.modules)"
    folder = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=folder, check=False).returncode == 0
