"""The bytes of one tensor out of a file. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from appliance.quant.errors import CheckpointError


def read_range(path: Path, handle: int, tensor: str, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` of an open file from `offset`, in memory of their own; the handle's position stays.

    Read, not mapped: where a file is cut short while it is open, a map ends the process.

    Raises:
        CheckpointError: the file was cut short since its header was read.
        OSError: it cannot be read.
    """
    data = np.empty(nbytes, dtype=np.uint8)
    view, done = data.data, 0
    while done < nbytes:
        count = os.preadv(handle, [view[done:]], offset + done)
        if not count:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} has {done} of its {nbytes} bytes left: the file was cut short"
            )
        done += count
    return data
