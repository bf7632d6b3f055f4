"""How long the device takes for a call whose data is not in its cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def seconds(calls: Sequence[Call], device: torch.device, repeats: int) -> float:
    """Of one call, the median over some replays of all of them one after the other, recorded as one CUDA graph.

    On the CPU, interpreted, they are called once, and the time means nothing.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    graph = recorded(calls)
    times = []
    for _ in range(repeats + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times[1:])


def recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Compiled first, then recorded."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def cold_copies(num_bytes: int, device: torch.device) -> int:
    """How many sets of so many bytes are enough that, one after the other, none is in the cache when it is used."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(64, max(2, -(-4 * cache // num_bytes)))
