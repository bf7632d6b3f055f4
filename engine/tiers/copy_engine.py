"""Moving blocks of KV memory between tiers: what is asked for, and what is known of it. Imports no torch.

The caller's duty: until a ticket is done, its sources may be read by steps but not written, and its targets neither.
What it demotes, a step wrote before `submit`; what it promotes, a step reads only once the ticket is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Event
from typing import Protocol

from appliance.engine.errors import CopyError
from appliance.engine.types import BlockCopy

# A bandwidth forgets half of what it was measured by with so many further bytes.
_HALF_LIFE_BYTES = 64 * 2**20


class Way(Enum):
    """From which tier to which."""

    OUT = "out"
    """From the device to the host: a demotion."""
    IN = "in"
    """From the host to the device: a promotion."""
    WITHIN = "within"
    """Inside a tier."""


def way_of(copy: BlockCopy) -> Way:
    if copy.source.tier == copy.target.tier:
        return Way.WITHIN
    return Way.OUT if copy.target.tier == "host" else Way.IN


class Ticket:
    """A batch of copies that was submitted; they are made one after the other in the order given.

    Attributes:
        error: why not all of them were made, None where they were or are still to be. After an error every target of
            the batch holds anything.
    """

    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        self.copies = tuple(copies)
        self.error: CopyError | None = None
        self._ended = Event()

    @property
    def done(self) -> bool:
        """Whether it has come to an end, good or bad."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, and say whether it has come."""
        return self._ended.wait(timeout_s)

    def end(self, error: CopyError | None) -> None:
        """For the engine that makes the copies, once."""
        assert not self.done, "a ticket ends once"
        self.error = error
        self._ended.set()


@dataclass(slots=True)
class Traffic:
    """What moves one way, in whole blocks.

    Attributes:
        in_flight_bytes: submitted, and neither made nor given up.
        bytes_total: made.
    """

    in_flight_bytes: int = 0
    bytes_total: int = 0
    _recent_bytes: float = 0.0
    _recent_s: float = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes were made in so much time, waiting for their turn not counted."""
        kept = 0.5 ** (num_bytes / _HALF_LIFE_BYTES)
        self._recent_bytes = kept * self._recent_bytes + num_bytes
        self._recent_s = kept * self._recent_s + seconds
        self.bytes_total += num_bytes
        self.in_flight_bytes -= num_bytes

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of late, None as long as nothing was measured."""
        return self._recent_bytes / self._recent_s if self._recent_s else None


class CopyEngine(Protocol):
    """Copies blocks while steps run.

    Tickets that have a block in common take effect in the order of submission; others may overtake each other. Where a
    source was to be filled by a ticket that failed and that `completed` had not told of, a ticket fails, too.
    """

    def submit(self, copies: Sequence[BlockCopy]) -> Ticket:
        """Ask for some copies, at least one, and wait for none of them; their errors are the ticket's, never raised."""

    def completed(self) -> list[Ticket]:
        """Tickets that are done, each told of once, in the order of submission as far as they are told of together."""

    def traffic(self, way: Way) -> Traffic:
        """A snapshot."""

    def close(self) -> None:
        """Give up copies that have not begun: their tickets fail. Afterwards nothing touches the memory any more."""
