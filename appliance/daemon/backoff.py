"""How soon a dead worker may be started again."""

from __future__ import annotations

from collections import deque

FIRST_DELAY_S = 0.5
WINDOW_S = 300.0
DEATHS_TO_OPEN = 5


class Backoff:
    """Delays that double with each death of the last `WINDOW_S`, and a circuit breaker.

    `DEATHS_TO_OPEN` deaths within `WINDOW_S` open the breaker: from then on a start is tried only every
    `WINDOW_S`, until a worker has lived that long.

    Attributes:
        is_open: nothing should be promised to clients before a start has succeeded.
    """

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self.is_open = False

    def record_death(self, now: float, lived_s: float) -> None:
        """Note that a worker which had served for `lived_s` died `now`, on a monotonic clock."""
        if lived_s > WINDOW_S:
            self.is_open = False
        self._deaths.append(now)
        while now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        self.is_open = self.is_open or len(self._deaths) >= DEATHS_TO_OPEN

    @property
    def delay_s(self) -> float:
        """From the last death to the next start."""
        if self.is_open:
            return WINDOW_S
        return float(FIRST_DELAY_S * 2 ** (len(self._deaths) - 1))
