"""A simulation from its seed; where it fails, what is needed to see it again, and the least that makes it fail."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TypeVar

from sim.checks import Figures
from sim.traffic import Action, NotedTraffic, RandomTraffic, Settings, make_settings
from sim.world import World

Notes = Many[tuple[int, Action]]
T = TypeVar("T")


class SimulationError(AssertionError):
    """A simulation failed.

    Attributes:
        seed, step: where.
        notes: all that had happened.
    """

    def __init__(self, seed: int, world: World, cause: Exception) -> None:
        self.seed = seed
        self.step = world.step
        self.notes = world.notes
        super().__init__(
            f"seed {seed}, step {world.step}, {world.settings}: {type(cause).__name__}: {cause}; to see it again: "
            f"PYTHONPATH=tests python -m sim --first {seed} --seeds 1 --steps {world.step + 1} --shrink"
        )


def simulate(seed: int, steps: int) -> Figures:
    """Run a seed's traffic for so many steps.

    Raises:
        SimulationError: something did not hold.
    """
    settings = make_settings(seed)
    world = World(settings, RandomTraffic(seed, settings))
    try:
        world.run(steps)
    except Exception as error:
        raise SimulationError(seed, world, error) from error
    return world.figures


def shrink(settings: Settings, notes: Notes, steps: int) -> Notes:
    """A small part of what had happened that fails as well, though perhaps elsewhere."""

    def fails(some: Notes) -> bool:
        try:
            World(settings, NotedTraffic(some)).run(steps)
        except Exception:
            return True
        return False

    return shrink_list(notes, fails)


def shrink_list(items: Many[T], fails: Callable[[Many[T]], bool]) -> Many[T]:
    """Leave out ever smaller runs of items for as long as the rest still fails."""
    size = len(items)
    while size := size // 2:
        start = 0
        while start < len(items):
            rest = [*items[:start], *items[start + size :]]
            if fails(rest):
                items = rest
            else:
                start += size
    return items
