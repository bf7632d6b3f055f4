"""Experts whose weights are stacked in one tensor, as a module each. No torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from appliance.quant.architectures import Experts
from appliance.quant.errors import CheckpointError
from appliance.quant.hf.file import TensorInfo

# What follows the name of a stack → the suffix of the tensor in a module.
_SUFFIXES = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


def unstack(modules: defaultdict[str, dict[str, TensorInfo]], experts: Experts, count: int) -> None:
    """Add a module for each matrix of each stacked expert, beside the modules of single experts.

    A stack is `gate_up_proj` or `down_proj` of a module `experts`, plain or in blocks with scales, perhaps with a bias.
    Of each, only the bytes of the one expert are read.

    Args:
        modules: module → suffix → tensor.

    Raises:
        CheckpointError: a stack is not of `count` experts.
    """
    for name in [name for name in modules if name.endswith(".experts")]:
        for suffix, ours in _SUFFIXES.items():
            gate_up, down = (modules[name].get(stem + suffix) for stem in ("gate_up_proj", "down_proj"))
            # A bias has no inputs, blocks and scales have them last.
            transposed = experts.interleaved and ours == "weight"
            for expert in range(count):
                p = f"{name}.{expert}."
                if gate_up is not None:
                    both = _expert(gate_up, expert, count, transposed=transposed)
                    modules[p + experts.gate][ours] = _half(both, 0, interleaved=experts.interleaved)
                    modules[p + experts.up][ours] = _half(both, 1, interleaved=experts.interleaved)
                if down is not None:
                    modules[p + experts.down][ours] = _expert(down, expert, count, transposed=transposed)


def _expert(info: TensorInfo, expert: int, count: int, *, transposed: bool) -> TensorInfo:
    """[count, …] → […] of one expert."""
    if len(info.shape) < 2 or info.shape[0] != count or (transposed and len(info.shape) != 3):
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is {info}, expected one of {count} experts")
    nbytes = info.nbytes // count
    shape = info.shape[:0:-1] if transposed else info.shape[1:]
    return replace(
        info, shape=shape, offset=info.offset + expert * nbytes, nbytes=nbytes, transposed=transposed
    )


def _half(info: TensorInfo, which: int, *, interleaved: bool) -> TensorInfo:
    """The gates, 0, or the ups, 1, of both."""
    if info.shape[0] % 2:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} is {info} for each expert, expected gates and ups"
        )
    half = replace(info, shape=(info.shape[0] // 2, *info.shape[1:]), nbytes=info.nbytes // 2)
    if interleaved:
        return replace(half, step=2, start=which)
    return replace(half, offset=info.offset + which * half.nbytes)
