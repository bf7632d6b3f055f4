"""A model in this process: what `LLM` and `AsyncLLM` stand on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from appliance.engine.engine import Engine
from appliance.progress import LoadProgress
from appliance.pull.ensure import ensure_model
from appliance.settings import PYTHON, load_settings
from appliance.text.tokenizer import Tokenizer

log = logging.getLogger("appliance")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model; `appliance rm` leaves it alone until `held` is closed."""

    tokenizer: Tokenizer
    engine: Engine
    held: IO[bytes]


def load(model: str, settings: Mapping[str, Any]) -> Loaded:
    """Load `model` with settings by their names, as a call gave them; a model that is not there is pulled first.

    A terminal on stderr sees how far it is.

    Raises:
        SettingsError, ModelError, CheckpointError, EngineError: what is wrong and what to do about it.
    """
    resolved = load_settings({"model": model, **settings}, PYTHON)
    found = ensure_model(resolved)
    with contextlib.ExitStack() as undo:
        held = undo.enter_context(found.hold())
        tokenizer = Tokenizer.load(found.path)
        with LoadProgress(found.name, plain=False) as progress:
            engine = Engine(resolved.engine_config(found.path), lambda done, total: progress.at(done / total))
        undo.pop_all()
    for note in engine.info.notes:
        log.warning("%s", note)
    return Loaded(tokenizer, engine, held)
