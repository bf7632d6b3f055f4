"""Small models whole, on the device, against the CPU's reference: the same tokens, teacher-forced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from appliance.engine.decoder import build_program
from appliance.engine.executors.base import Executor
from appliance.engine.executors.gpu_executor import GpuExecutor
from appliance.engine.executors.torch_executor import TorchExecutor
from appliance.engine.families import read_spec
from appliance.engine.kv_groups import kv_groups
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow
from appliance.engine.weights import ModelWeights
from appliance.kernels.kv_layout import KVLayout
from appliance.quant.checkpoint import open_checkpoint
from benchmarks.device_check.report import Row, error
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.source_tree import ROOT

_GOLDEN = ROOT / "tests" / "golden"
_BLOCK = 16
# Of the largest logit: activations, keys and values are rounded some dozen times on the way.
_TOLERANCE = {torch.float16: 2**-7, torch.bfloat16: 2**-4}


def quality(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, share: int = 0, shares: int = 1
) -> Iterator[Row]:
    """Of the models one share."""
    for name in sizes.models[share::shares]:
        try:
            yield from _compared(name, device, sizes, dtype)
        except Exception as problem:
            # The others are still to be seen.
            yield error(f"{name}: {problem!r}", 1.0, "failure", 0.0)


def _compared(name: str, device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    path = next((_GOLDEN / name).glob("*.gguf"), _GOLDEN / name)
    reference = _logits(path, sizes, None, device)
    found = _logits(path, sizes, dtype, device)
    off = float((found - reference).abs().nan_to_num(torch.inf).max() / reference.abs().max())
    yield error(f"{name}, largest difference", off, "of the largest logit", _TOLERANCE[dtype])
    expected = reference.log_softmax(-1)
    divergence = (expected.exp() * (expected - found.log_softmax(-1))).sum(-1)
    yield Row(f"{name}, mean KL divergence", float(divergence.mean()), "")
    same = (found.argmax(-1) == reference.argmax(-1)).double().mean()
    yield Row(f"{name}, same most likely token", float(same) * 100, "%")


def _logits(path: Path, sizes: Sizes, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Double logits [tokens, vocab] of a fixed text, a prompt and then token by token; without a dtype, by the CPU."""
    with open_checkpoint(path) as checkpoint:
        spec = read_spec(checkpoint.architecture, checkpoint.metadata, frozenset(checkpoint.names()))
        weights, program = ModelWeights(checkpoint), build_program(spec)
        layout = KVLayout(kv_groups(spec, dtype or torch.float32), _BLOCK)
        executor: Executor
        if dtype is None:
            executor = TorchExecutor(program, spec, weights, layout, 1 << 30, _silent)
        else:
            executor = GpuExecutor(
                program, spec, weights, layout, device=device, dtype=dtype, progress=_silent
            )
    executor.attach_pools([4] * len(layout.groups), 64)
    generator = torch.Generator().manual_seed(1)
    prompt, tokens = sizes.model_tokens
    ids = torch.randint(0, spec.vocab_size, (tokens,), generator=generator).tolist()
    steps = [(0, prompt), *((token, token + 1) for token in range(prompt, tokens))]
    logits = []
    for start, stop in steps:
        table = tuple((2, 0, 3, 1)[: -(-stop // _BLOCK)])
        sampling = SamplingParams(temperature=0.0)
        tables = (table,) * len(layout.groups)
        executor.run([PlanRow("r", tuple(ids[start:stop]), start, tables, True, sampling, (0,))], [])
        logits.append(executor.logits(range(stop - start)).double().cpu())
    return torch.cat(logits)


def _silent(_done: int, _total: int) -> None:
    pass
