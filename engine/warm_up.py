"""The first steps of a model, so that later ones find every kernel compiled, and what they take in memory is known."""

from __future__ import annotations

from appliance.engine.runner import Runner
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow, StepPlan

# What sampling does most work for.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)


def warm_up(
    runner: Runner, *, groups: int, block_size: int, max_tokens: int, max_seqs: int, max_model_len: int
) -> None:
    """Run prompts of all sizes up to the largest step, and steps of the most sequences there can be.

    The first sequence is as long as one can be, so that the largest tables and partial results there can be are made;
    all of them share the first block of each pool, and what is in it afterwards means nothing.

    Args:
        groups: of KV memory.
        max_tokens, max_seqs: of a step.
    """

    def row(index: int, stop: int, num_tokens: int) -> PlanRow:
        table = (0,) * -(-stop // block_size)
        ids, start = (0,) * num_tokens, stop - num_tokens
        return PlanRow(str(index), ids, start, (table,) * groups, True, _SAMPLING, (index,))

    def step(prompt: int, others: int) -> None:
        rows = [row(0, max_model_len, prompt), *(row(1 + index, 1, 1) for index in range(others))]
        runner.run(StepPlan(0, tuple(rows)))

    longest = min(max_tokens, max_model_len)
    size = 1
    while size < longest:
        step(size, 0)
        size *= 2
    step(longest, 0)
    others = min(max_seqs, max_tokens) - 1
    step(1, others)
    step(min(longest, max_tokens - others), others)
