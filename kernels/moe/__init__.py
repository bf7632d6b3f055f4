"""Choosing experts for rows, and running them."""

from appliance.kernels.moe.reference import route, run_experts

__all__ = ["route", "run_experts"]
