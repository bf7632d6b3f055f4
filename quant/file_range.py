"""The bytes of one tensor out of a file. No torch."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from appliance.quant.errors import CheckpointError

_SCRATCH_BYTES = 4 << 20


class _Scratch(threading.local):
    """A buffer for each thread, which stays in the cache and in place."""

    def __init__(self) -> None:
        self.buffer = np.empty(_SCRATCH_BYTES, dtype=np.uint8)


_scratch = _Scratch()


def read_range(path: Path, handle: int, tensor: str, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` of an open file from `offset`, in memory of their own; the handle's position stays.

    Read, not mapped: where a file is cut short while it is open, a map ends the process. And read by way of a buffer:
    the system gives new memory to a program that writes to it far faster than to its own reads.

    Raises:
        CheckpointError: the file was cut short since its header was read.
        OSError: it cannot be read.
    """
    data = np.empty(nbytes, dtype=np.uint8)
    done = 0
    while done < nbytes:
        part = _scratch.buffer[: nbytes - done]
        count = os.preadv(handle, [part.data], offset + done)
        if not count:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} has {done} of its {nbytes} bytes left: the file was cut short"
            )
        data[done : done + count] = part[:count]
        done += count
    return data
