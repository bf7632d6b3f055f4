"""Messages between the daemon and an engine worker: msgpack over ZeroMQ, never pickle. Imports no torch.

One DEALER socket on each side of an `ipc://` address; the daemon binds, the worker connects. The first message to a
worker is `Start`; its answer is `Ready`, or `LoadFailed`, after which the process ends. Until then it says now and
then how far it is. `Stop` ends it at once.
"""

from __future__ import annotations

import msgspec

from appliance.engine.config import EngineConfig, EngineInfo
from appliance.engine.stats import EngineStats
from appliance.engine.types import ErrorInfo, Request, TokenEvent


class Start(msgspec.Struct, frozen=True, tag=True):
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one continuation of it; answered by its terminal events unless it has ended already."""

    request_id: str
    index: int | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process. Requests still running get no more events."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """So many of the model's weights are read; sent every `HEARTBEAT_S` at most, and when all are."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


class StepBegan(msgspec.Struct, frozen=True, tag=True):
    """The requests with rows in the step about to run; sent when the set differs from the last one sent.

    If the worker dies, these were in the fatal step.
    """

    request_ids: tuple[str, ...]


class Events(msgspec.Struct, frozen=True, tag=True):
    events: tuple[TokenEvent, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the step loop itself every `HEARTBEAT_S`, or after a step that took longer: silence is a hang."""

    stats: EngineStats


ToWorker = Start | Submit | Abort | Stop
FromWorker = Loading | Ready | LoadFailed | StepBegan | Events | Heartbeat

HEARTBEAT_S = 0.25

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
