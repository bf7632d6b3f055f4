"""The first steps of a model, so that later ones find every kernel compiled, and what they take in memory is known."""

from __future__ import annotations

from appliance.engine.runner import Runner
from appliance.engine.sampling_params import SamplingParams
from appliance.engine.types import PlanRow, StepPlan

# What most work is done for after the last layer.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
# Attention may keep partial results of every sequence for as many tokens as the shortest prompts have.
_SHORTEST_PROMPTS = range(2, 17)


def warm_up(
    runner: Runner, *, groups: int, block_size: int, max_tokens: int, max_seqs: int, max_model_len: int
) -> None:
    """Run prompts of every size up to the largest step, and the most sequences there can be.

    One of the sequences is as long as one can be, so that tables and partial results are as large as they become. All
    of them have their keys and values in the first block of each pool: what is in there afterwards means nothing.

    Args:
        groups: of KV memory.
        max_tokens, max_seqs: of a step.
        max_model_len: tokens.
    """

    def row(index: int, stop: int, num_tokens: int) -> PlanRow:
        table = (0,) * -(-stop // block_size)
        ids = (0,) * num_tokens
        return PlanRow(str(index), ids, stop - num_tokens, (table,) * groups, True, _SAMPLING, (index,))

    def step(prompt: int, others: int) -> None:
        prompts = [row(0, prompt, prompt)] if prompt else []
        longest = [row(1, max_model_len, 1)] if others else []
        runner.run(StepPlan(0, (*prompts, *longest, *(row(index, 1, 1) for index in range(2, 1 + others)))))

    largest = min(max_tokens, max_model_len)
    size = 1
    while size < largest:
        step(size, 0)
        size *= 2
    step(largest, 0)
    step(0, max_seqs)
    if max_tokens > max_seqs > 1:
        most = min(largest, max_tokens - max_seqs + 1)
        for prompt in sorted({min(most, prompt) for prompt in (*_SHORTEST_PROMPTS, most)}):
            step(prompt, max_seqs - 1)
