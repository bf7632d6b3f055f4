"""Root-mean-square normalisation of rows."""

from appliance.kernels.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
