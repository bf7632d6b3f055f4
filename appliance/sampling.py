"""The sampling a model's makers recommend, used where a request over HTTP leaves it open."""

from __future__ import annotations

import msgspec

from appliance.engine.sampling_params import SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values as in `SamplingParams`; without a recommendation, its own.

    Raises:
        ParameterError: a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        SamplingParams(**msgspec.structs.asdict(self))
