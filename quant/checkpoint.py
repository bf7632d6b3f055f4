"""A checkpoint of any kind, opened."""

from __future__ import annotations

from pathlib import Path

from appliance.quant.gguf.checkpoint import GGUFCheckpoint
from appliance.quant.hf.checkpoint import HFCheckpoint

Checkpoint = GGUFCheckpoint | HFCheckpoint


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A GGUF file, or a folder as transformers saves it.

    Raises:
        CheckpointError: something in it is corrupt or contradicts itself.
        UnsupportedFormatError: an architecture or a format that is not read.
        OSError: a file cannot be read.
    """
    return HFCheckpoint(path) if Path(path).is_dir() else GGUFCheckpoint(path)
