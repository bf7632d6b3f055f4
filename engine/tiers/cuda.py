"""KV blocks between a GPU's memory and pinned main memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from appliance.engine.tiers.copy_thread import Run
from appliance.engine.tiers.memory import HostPool, Tiers


def pinned(num_bytes: int) -> torch.Tensor:
    """Memory that the GPU copies from and to by itself, uint8 [num_bytes].

    Raises:
        RuntimeError: the driver refuses.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class CudaMover(Tiers):
    """A `Mover` by a stream of its own, so that blocks move while kernels run.

    Only the engine's thread waits, for a portion at a time, and what it waits for lets go of the interpreter:

    - A fence is an event on the caller's stream. Nothing of a batch begins before it has passed, so that a demotion
      reads what steps launched before `submit` wrote, and a promotion writes where they no longer read.
    - A ticket is done once the copies' own event has passed. Whatever the caller launches after it saw the ticket done
      reads what a promotion brought; no stream has to wait for another.
    """

    # At 25 GB/s, a portion takes 1.3 ms, beside which waking the thread for the next one is nothing.
    portion_bytes = 32 * 2**20

    def __init__(self, device: Sequence[torch.Tensor], host: Sequence[HostPool]) -> None:
        super().__init__(device, host)
        self._stream = torch.cuda.Stream(device[0].device)  # type: ignore[no-untyped-call]

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def pass_fence(self, fence: object) -> None:
        assert isinstance(fence, torch.cuda.Event)
        fence.synchronize()

    def move(self, run: Run) -> None:
        # Copies inside main memory are made when the call returns, out of the stream's order; a portion goes one
        # way, so that nothing else of it touches their blocks.
        with torch.cuda.stream(self._stream):
            for (target, to), (source, at), count in self.pieces(run):
                target[to : to + count].copy_(source[at : at + count], non_blocking=True)

    def finish(self) -> None:
        # Sleeps until then; waiting for the stream would spin.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()
