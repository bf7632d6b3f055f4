"""How much KV memory to take and how long a context it can serve: a pure function. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.engine.errors import MemoryPlanError

# Without a word from the user, the pool takes at most this share of the free memory, and at most this much.
_AUTO_SHARE = 0.25
_AUTO_LIMIT_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The outcome: pool size in blocks, and the context that is served, in tokens.

    Attributes:
        note: why less is served than was asked for, "" when it is not.
    """

    num_blocks: int
    max_model_len: int
    note: str


def plan_memory(
    *,
    free_bytes: int,
    block_bytes: int,
    block_size: int,
    model_context_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_memory_bytes: int | None,
    share: float | None = None,
) -> MemoryPlan:
    """Size the pool and the context. Never refuses a long context: it serves min(wanted, model, pool).

    Monotonic: with more free or requested bytes or a larger share, neither the pool nor the context shrinks;
    asking for a shorter context never serves less than min(asked, what a longer one got).

    Args:
        free_bytes: memory free once the weights are loaded.
        block_bytes, block_size: bytes and tokens of one block (of all groups together).
        max_model_len: context the user wants, None for the model's own.
        kv_cache_memory_bytes: pool the user wants, None for a share of what is free.
        share: the most that this may be, 0 to 1; None for a quarter and at most 4 GiB.

    Raises:
        MemoryPlanError: not even two blocks fit, or more is asked for than is free.
    """
    budget = kv_cache_memory_bytes
    if budget is None and share is not None:
        budget = int(free_bytes * share)
    elif budget is None:
        budget = min(int(free_bytes * _AUTO_SHARE), _AUTO_LIMIT_BYTES)
    elif budget > free_bytes:
        raise MemoryPlanError(
            f"kv_cache_memory_bytes asks for {_mib(budget)}, but {_mib(free_bytes)} are free; ask for less"
        )
    wanted = min(max_model_len or model_context_len, model_context_len)
    if budget < 2 * block_bytes:
        raise MemoryPlanError(
            f"the KV pool would have {_mib(budget)}, but two blocks of {block_size} tokens take "
            f"{_mib(2 * block_bytes)}; free some memory, or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    useful = max(2, max_num_seqs * -(-wanted // block_size))
    num_blocks = min(budget // block_bytes, useful)
    served = min(wanted, num_blocks * block_size)
    return MemoryPlan(num_blocks, served, _note(served, max_model_len, model_context_len))


def _note(served: int, asked: int | None, model_context_len: int) -> str:
    if asked is not None and asked > model_context_len:
        return f"max_model_len asks for {asked} tokens, the model was made for {model_context_len}: serving {served}"
    wanted = asked or model_context_len
    if served < wanted:
        return f"the KV pool holds {served} tokens: serving a context of {served} instead of {wanted}"
    return ""


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
