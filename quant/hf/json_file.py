"""JSON files of a model folder. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from appliance.quant.errors import CheckpointError

# A tokeniser's file is the largest there is, some 30 MB; in memory, lists may take twenty times their text.
MAX_JSON_BYTES = 64_000_000


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not an object.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; fetch the model again")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value
