"""What rounding activations costs, on a real model: native kernels against float32, each told the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import load_executor

from appliance.engine.executors import Executor
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow
from appliance.kernels.linear.cpu import Precision
from appliance.kernels.native import forced_isa
from appliance.text.tokenizer import Tokenizer

pytestmark = pytest.mark.starter

QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a dragon who learns to cook.",
    "List the steps to change a bicycle tire.",
    "What is the difference between a list and a tuple in Python? Give examples.",
    "Summarise the causes of the first world war.",
)
ANSWER_TOKENS = 200
BLOCKS = 24


def logits(executor: Executor, ids: tuple[int, ...], first: int) -> torch.Tensor:
    """Of the tokens from `first` on, computed in chunks of 128."""
    parts = []
    for start in range(0, len(ids), 128):
        chunk = ids[start : start + 128]
        table = tuple(BLOCKS - 1 - block for block in range(-(-(start + len(chunk)) // 16)))
        executor.run([PlanRow("a", chunk, start, (table,), True, SamplingParams(), (0,))], [])
        parts.append(executor.logits(range(len(chunk))))
    return torch.cat(parts)[first:]


def answer(executor: Executor, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt and what is most likely to follow."""
    ids, start = prompt, 0
    while len(ids) < len(prompt) + ANSWER_TOKENS:
        new = ids[start:]
        table = tuple(range(-(-len(ids) // 16)))
        row = PlanRow("a", new, start, (table,), True, SamplingParams(), (0,))
        start = len(ids)
        ids = (*ids, *executor.run([row], [len(new) - 1]).largest.tolist())
    return ids


@pytest.fixture(scope="module")
def texts(starter_model: Path) -> list[tuple[tuple[int, ...], int]]:
    """Each question with its answer, and where the answer begins."""
    tokenizer = Tokenizer.load(starter_model)
    executor = load_executor(starter_model, "cpu", blocks=BLOCKS)
    found = []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(text, parse_special=True))
        found.append((answer(executor, prompt), len(prompt) - 1))
    return found


@pytest.fixture(scope="module")
def expected(starter_model: Path, texts: list[tuple[tuple[int, ...], int]]) -> list[torch.Tensor]:
    reference = load_executor(starter_model, "reference", blocks=BLOCKS)
    return [logits(reference, ids, first) for ids, first in texts]


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "isa", "most_divergence", "least_agreement"),
    [
        ("int8", "bfloat16", "", 0.004, 0.965),
        ("int8", "bfloat16", "avx2", 0.004, 0.965),
        ("int8", "int8", "", 0.006, 0.95),
        ("bf16", "bfloat16", "", 0.0002, 0.99),
        ("float32", "float32", "avx2", 1e-7, 0.999),
    ],
)
def test_distributions_stay_close(
    starter_model: Path,
    texts: list[tuple[tuple[int, ...], int]],
    expected: list[torch.Tensor],
    precision: Precision,
    kv_dtype: str,
    isa: str,
    most_divergence: float,
    least_agreement: float,
) -> None:
    executor = load_executor(starter_model, "cpu", precision=precision, kv_dtype=kv_dtype, blocks=BLOCKS)
    divergences, agreements = [], []
    for (ids, first), reference in zip(texts, expected, strict=True):
        with forced_isa(isa):
            got = logits(executor, ids, first).log_softmax(-1)
        wanted = reference.log_softmax(-1)
        divergences.append((wanted.exp() * (wanted - got)).sum(-1))
        agreements.append((wanted.argmax(-1) == got.argmax(-1)).float())
    divergence, agreement = torch.cat(divergences).mean(), torch.cat(agreements).mean()
    assert divergence <= most_divergence
    assert agreement >= least_agreement
