"""Which tile multiplies a matrix fastest on a device: measured while a model is loaded, and kept in a file.

Whatever is measured, results are the same to the bit: it only chooses among `gpu.candidates`. A file is of one device
under one version of PyTorch, of Triton and of the kernels; it is written whole and then renamed, and one that is not
as it should be is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import triton

from appliance.kernels.linear import gpu, gpu_block
from appliance.kernels.linear.gpu import Tile, candidates, multiply, tile_for
from appliance.kernels.linear.gpu_matrix import GpuMatrix

Clock = Callable[[Callable[[], object]], float]
"""How long something takes, in seconds; it may be done several times."""
Progress = Callable[[int, int], None]
"""Told how many of how many are measured."""

# Numbers of rows that tiles are measured for; others take the tile of the next one, and the highest of the last one.
ROWS = (8, 16, 32, 64, 256, 1024)
_TIMES = 7
# Many times what a level-2 cache holds, for it is also to take longer than some launches.
_FLUSHED_BYTES = 2**29
_Key = tuple[object, ...]


class Tuning:
    """The fastest tiles on a device for activations of a type; without measurements the usual ones.

    Attributes:
        note: why measurements were not kept, "" where they were or there are none.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Reads what was measured before.

        Args:
            folder: where such files are kept; it need not exist.
            dtype: float16 or bfloat16.
        """
        self._device, self._dtype = device, dtype
        self._made_by = _made_by(device)
        name = hashlib.sha256(json.dumps(self._made_by).encode()).hexdigest()[:32]
        self._path = folder / f"{name}.json"
        self._tiles = self._read()
        self.note = ""

    def tile_for(self, matrix: GpuMatrix, rows: int) -> Tile:
        """The tile for so many rows of x; nothing is measured or read."""
        found = self._tiles.get(_name(self._key(matrix, rows)))
        return next((tile for tile in candidates(matrix, rows) if tile == found), tile_for(matrix, rows))

    def tune(
        self,
        matrices: Iterable[GpuMatrix],
        rows_list: Sequence[int],
        *,
        clock: Clock | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Measure what is not known yet, and keep it.

        Args:
            matrices: on the device; of several of the same shape and kind one is measured.
            rows_list: numbers of rows of x that will be multiplied.
            clock: None for `ColdClock`; without a GPU nothing is measured then.
        """
        if clock is None and self._device.type != "cuda":
            return
        missing = {}
        for matrix in matrices:
            for rows in rows_list:
                key = _name(self._key(matrix, rows))
                if self._tiles.get(key) not in candidates(matrix, _bucket(rows)):
                    missing[key] = (matrix, _bucket(rows))
        if not missing:
            return
        clock = clock or ColdClock(self._device)
        for done, (key, (matrix, rows)) in enumerate(missing.items(), 1):
            self._tiles[key] = self._fastest(matrix, rows, clock)
            if progress:
                progress(done, len(missing))
        self._write()

    def _fastest(self, matrix: GpuMatrix, rows: int, clock: Clock) -> Tile:
        tiles = candidates(matrix, rows)
        if len(tiles) == 1:
            return tiles[0]
        # Not of zeros, which take less power.
        generator = torch.Generator(self._device).manual_seed(0)
        x = torch.randn(rows, matrix.input_width, generator=generator, device=self._device).to(self._dtype)
        out = x.new_empty(rows, matrix.rows)
        return min(tiles, key=lambda tile: clock(lambda: multiply(matrix, x, out=out, tile=tile)))

    def _key(self, matrix: GpuMatrix, rows: int) -> _Key:
        """All that the time depends on."""
        given = (matrix.scales, matrix.zeros, matrix.biases, matrix.super_scales, matrix.table, matrix.inputs)
        types = tuple(None if each is None else str(each.dtype) for each in given)
        shape = (matrix.rows, matrix.columns, matrix.bits, matrix.group, matrix.super_group)
        return (*shape, *types, str(self._dtype), _bucket(rows))

    def _read(self) -> dict[str, Tile]:
        try:
            digest, _, body = self._path.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return {}
            found = json.loads(body)
            if found["made_by"] != self._made_by:
                return {}
            return {str(key): Tile(*tile) for key, tile in found["tiles"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        # What another process has added meanwhile stays.
        tiles = {key: astuple(tile) for key, tile in sorted((self._read() | self._tiles).items())}
        body = json.dumps({"made_by": self._made_by, "tiles": tiles}, indent=1).encode()
        temporary = ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            os.replace(temporary, self._path)
        except OSError as error:
            self.note = f"the fastest tiles are not kept, and are measured again at the next load: {error}"
            with contextlib.suppress(OSError):
                os.unlink(temporary)


class ColdClock:
    """The time that a GPU takes, with nothing in its level-2 cache: the median of some."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object]) -> float:
        run()  # which compiles it
        times = [self._once(run) for _ in range(_TIMES)]
        torch.cuda.synchronize(self._flushed.device)
        seconds: float = statistics.median(start.elapsed_time(stop) / 1000 for start, stop in times)
        return seconds

    def _once(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # Meanwhile all that is timed is launched, so that the GPU waits for none of it.
        self._flushed.zero_()
        start.record()
        run()
        stop.record()
        return start, stop


def _bucket(rows: int) -> int:
    return ROWS[min(bisect_left(ROWS, rows), len(ROWS) - 1)]


def _name(key: _Key) -> str:
    return " ".join(map(str, key))


def _made_by(device: torch.device) -> dict[str, Any]:
    """What other measurements than one's own are told by."""
    sources = hashlib.sha256()
    for source in (gpu.__file__, gpu_block.__file__, __file__):
        sources.update(Path(source).read_bytes())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": sources.hexdigest(),
    }
