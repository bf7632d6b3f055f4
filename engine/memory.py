"""How much KV memory to take and how long a context it can serve: a pure function. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.engine.blocks import most_blocks
from appliance.engine.errors import MemoryPlanError


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Memory that pools are taken from, and how much of it without a word from the user.

    Attributes:
        name: in messages.
        share: the most that pools take of what is free.
        limit_bytes: the most that they take, None for no limit.
        reserve_bytes: what they leave, if that is more than the share does.
    """

    name: str
    share: float
    limit_bytes: int | None = None
    reserve_bytes: int = 0

    def modest(self, free_bytes: int) -> int:
        """What pools take of so much free memory; more of more."""
        most = min(int(free_bytes * self.share), free_bytes - self.reserve_bytes)
        return max(0, most if self.limit_bytes is None else min(most, self.limit_bytes))


MAIN_MEMORY = MemoryKind("main memory", share=0.25, limit_bytes=4 * 2**30)
# A device of its own is there for the model; the reserve is for a desktop on it, which grows.
GPU_MEMORY = MemoryKind("the GPU's memory", share=0.9, reserve_bytes=512 * 2**20)


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """What a KV group needs: the bytes of a block, and the window behind which blocks are given back (0: never)."""

    block_bytes: int
    window: int = 0

    def blocks(self, context_blocks: int, chunk: int, block_size: int) -> int:
        """The most blocks held by a sequence of `context_blocks`, at most `chunk` tokens of it computed at once."""
        if not self.window:
            return context_blocks
        return min(context_blocks, most_blocks(self.window - 1 + chunk, block_size))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The outcome: the size of each group's pool in blocks, and the context that is served, in tokens.

    Attributes:
        note: why less is served than was asked for, "" when it is not.
    """

    num_blocks: tuple[int, ...]
    max_model_len: int
    note: str


def plan_memory(
    *,
    free_bytes: int,
    groups: Sequence[GroupNeed],
    block_size: int,
    chunk: int,
    model_context_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_memory_bytes: int | None,
    share: float | None = None,
    kind: MemoryKind = MAIN_MEMORY,
    situation: str = "",
) -> MemoryPlan:
    """Size the pools and the context. Never refuses a long context: it serves min(wanted, model, pools).

    Memory goes to one sequence first, until it can be as long as is wanted, then to `max_num_seqs` of equal length.
    Monotonic: with more free or requested bytes or a larger share, neither a pool nor the context shrinks;
    asking for a shorter context never serves less than min(asked, what a longer one got).

    Args:
        free_bytes: memory free once the weights are loaded.
        block_size: tokens of one block.
        chunk: most tokens of a sequence that a step computes.
        max_model_len: context the user wants, None for the model's own.
        kv_cache_memory_bytes: memory for all pools that the user wants, None for a share of what is free.
        share: the most that this may be, 0 to 1; None for what is modest with this kind of memory.
        kind: of the memory.
        situation: what else is to be said where pools don't fit, e.g. who holds the memory.

    Raises:
        MemoryPlanError: not even two blocks of each group fit, or more is asked for than is free.
    """
    end = f"; {situation}" if situation else ""
    if kv_cache_memory_bytes is not None and kv_cache_memory_bytes > free_bytes:
        raise MemoryPlanError(
            f"kv_cache_memory_bytes asks for {_mib(kv_cache_memory_bytes)}, but {_mib(free_bytes)} of {kind.name} "
            f"are free; ask for less{end}"
        )
    budget = kv_cache_memory_bytes or (kind.modest(free_bytes) if share is None else int(free_bytes * share))
    wanted = min(max_model_len or model_context_len, model_context_len)
    context_blocks = -(-wanted // block_size)
    most = [group.blocks(context_blocks, chunk, block_size) for group in groups]

    def sizes(step: int) -> tuple[int, ...]:
        """The pools after `step` steps, each of which adds a block of context: one sequence's, then anybody's."""
        shared = step - context_blocks
        return tuple(max(2, min(step, each), min(shared, max_num_seqs * each)) for each in most)

    def cost(step: int) -> int:
        return sum(n * group.block_bytes for n, group in zip(sizes(step), groups, strict=True))

    if budget < cost(2):
        raise MemoryPlanError(
            f"the KV pool would have {_mib(budget)} of {kind.name}, but two blocks of {block_size} tokens take "
            f"{_mib(cost(2))}; free some memory, or raise kv_cache_memory_bytes or gpu_memory_utilization{end}"
        )
    steps = range(2, (max_num_seqs + 1) * context_blocks + 2)
    step = steps[bisect_right(steps, budget, key=cost) - 1]
    served = min(wanted, step * block_size)
    return MemoryPlan(sizes(step), served, _note(served, max_model_len, model_context_len))


def _note(served: int, asked: int | None, model_context_len: int) -> str:
    if asked is not None and asked > model_context_len:
        return f"max_model_len asks for {asked} tokens, the model was made for {model_context_len}: serving {served}"
    wanted = asked or model_context_len
    if served < wanted:
        return f"the KV pool holds {served} tokens: serving a context of {served} instead of {wanted}"
    return ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
