"""What every route shares: the settings, the served model and the stage of the daemon's life."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from appliance.daemon.errors import ApiError
from appliance.daemon.metrics import Metrics
from appliance.daemon.router import EngineRouter, UnknownModelError
from appliance.engine.config import EngineInfo
from appliance.names import ModelName, ModelNameError, choose
from appliance.sampling import SamplingDefaults
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded."""

    name: str
    info: EngineInfo
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: SamplingDefaults


class Daemon:
    """The state of one daemon process.

    Attributes:
        model_name: what clients call the model; known before it is loaded.
        loaded: resolves to the model, or to the reason why it could not be loaded.
        draining: set once no more requests are let in.
        active: generation requests that have arrived whole and are not yet fully answered.
        created: when the daemon started, seconds since the epoch.
    """

    def __init__(self, settings: Settings, model_name: str) -> None:
        self.settings = settings
        self.model_name = model_name
        self.router = EngineRouter()
        self.metrics = Metrics(self.router.workers)
        self.loaded: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self.active = 0
        self.created = int(time.time())

    @property
    def not_ready(self) -> str:
        """Why a request would not be served right now; "" if it would."""
        if self.draining.is_set():
            return "the daemon is shutting down"
        if not self.loaded.done():
            return f"{self.model_name} is loading"
        return self.router.worker(self.model_name).not_ready

    def is_called(self, name: str) -> bool:
        """Whether a client means the served model by `name`: in any case, with or without its tag."""
        if name.lower() == self.model_name.lower():
            return True
        try:
            return bool(choose(ModelName.parse(name), [self.model_name]))
        except ModelNameError:
            return False

    async def model(self, name: str, arrived_at: float) -> ServedModel:
        """The model called `name`; one that is still loading is waited for, as long as a request may take.

        Raises:
            UnknownModelError: no such model.
            ApiError: it was not loaded `request_timeout` seconds after `arrived_at` (504).
        """
        if not self.is_called(name):
            raise UnknownModelError(name, [self.model_name])
        left = arrived_at + self.settings.request_timeout - time.monotonic()
        try:
            return await asyncio.wait_for(asyncio.shield(self.loaded), left)
        except asyncio.TimeoutError:
            raise ApiError(504, f"{name} is still loading; try again", code="request_timeout") from None
