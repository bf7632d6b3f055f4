"""The memory planner: pure, monotonic, never refuses a long context."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.errors import MemoryPlanError
from appliance.engine.memory import GPU_MEMORY, MAIN_MEMORY, GroupNeed, MemoryKind, MemoryPlan, plan_memory


def plan(**changes: Any) -> MemoryPlan:
    given: dict[str, Any] = {
        "free_bytes": 2**34,
        "groups": [GroupNeed(2**20)],
        "block_size": 16,
        "chunk": 128,
        "model_context_len": 8192,
        "max_model_len": None,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": None,
    }
    return plan_memory(**{**given, **changes})


def grown(small: MemoryPlan, big: MemoryPlan) -> bool:
    return all(b >= a for a, b in zip(small.num_blocks, big.num_blocks, strict=True))


def test_ample_memory_serves_the_models_context() -> None:
    assert plan() == MemoryPlan(num_blocks=(4096,), max_model_len=8192, note="")


def test_a_context_larger_than_the_pool_is_served_as_far_as_the_pool_goes() -> None:
    got = plan(kv_cache_memory_bytes=100 * 2**20)
    assert (got.num_blocks, got.max_model_len) == ((100,), 1600)
    assert "1600" in got.note
    assert "8192" in got.note


def test_asking_for_more_than_the_model_has_is_said() -> None:
    got = plan(max_model_len=10_000)
    assert got.max_model_len == 8192
    assert "10000" in got.note


@pytest.mark.parametrize(("block_size", "max_model_len"), [(32, 32), (16, 16), (64, 40)])
def test_one_short_sequence_is_no_reason_to_refuse(block_size: int, max_model_len: int) -> None:
    got = plan(max_num_seqs=1, max_model_len=max_model_len, block_size=block_size)
    assert (got.num_blocks, got.max_model_len) == ((2,), max_model_len)


def test_no_more_blocks_than_all_sequences_could_fill() -> None:
    assert plan(max_num_seqs=2, max_model_len=160).num_blocks == (20,)


@pytest.mark.parametrize("size", [2**20, 2**40])
def test_a_pool_that_cannot_be_is_refused_with_both_numbers(size: int) -> None:
    with pytest.raises(MemoryPlanError, match=r"MiB.*MiB"):
        plan(kv_cache_memory_bytes=size)


def test_the_message_names_the_memory_and_who_holds_it() -> None:
    gpu: dict[str, Any] = {"kind": GPU_MEMORY, "situation": "Xorg (pid 1200) holds 0.4 GiB"}
    with pytest.raises(MemoryPlanError) as error:
        plan(**gpu, free_bytes=500 * 2**20)
    assert str(error.value) == (
        "the KV pool would have 0.0 MiB of the GPU's memory, but two blocks of 16 tokens take 2.0 MiB; free some "
        "memory, or raise kv_cache_memory_bytes or gpu_memory_utilization; Xorg (pid 1200) holds 0.4 GiB"
    )
    with pytest.raises(MemoryPlanError) as error:
        plan(**gpu, free_bytes=2**20, kv_cache_memory_bytes=2**21)
    assert str(error.value) == (
        "kv_cache_memory_bytes asks for 2.0 MiB, but 1.0 MiB of the GPU's memory are free; ask for less; "
        "Xorg (pid 1200) holds 0.4 GiB"
    )
    with pytest.raises(MemoryPlanError, match=r"of main memory are free; ask for less$"):
        plan(free_bytes=2**20, kv_cache_memory_bytes=2**21)


@pytest.mark.parametrize(
    ("kind", "free_gib", "taken_gib"),
    [
        (MAIN_MEMORY, 8, 2),
        (MAIN_MEMORY, 64, 4),
        (GPU_MEMORY, 20, 18),
        (GPU_MEMORY, 2, 1.5),
        (GPU_MEMORY, 0.25, 0),
    ],
)
def test_without_a_word_pools_take_little_of_main_memory_and_most_of_a_gpus(
    kind: MemoryKind, free_gib: float, taken_gib: float
) -> None:
    assert kind.modest(int(free_gib * 2**30)) == taken_gib * 2**30


sizes = st.integers(2**25, 2**36)
kinds = st.sampled_from([MAIN_MEMORY, GPU_MEMORY])
groups = st.lists(
    st.builds(GroupNeed, st.integers(2**14, 2**20), st.sampled_from([0, 1, 16, 17, 512, 4096, 2**20])),
    min_size=1,
    max_size=3,
)


@given(sizes, sizes, st.integers(16, 9000), st.integers(16, 9000), groups, kinds)
def test_more_memory_and_shorter_contexts_never_fit_worse(
    a: int, b: int, long: int, short: int, needs: list[GroupNeed], kind: MemoryKind
) -> None:
    less, more = sorted(kind.reserve_bytes + size for size in (a, b))
    short, long = sorted((long, short))
    small = plan(free_bytes=less, max_model_len=long, groups=needs, kind=kind)
    big = plan(free_bytes=more, max_model_len=long, groups=needs, kind=kind)
    assert grown(small, big)
    assert big.max_model_len >= small.max_model_len
    shorter = plan(free_bytes=less, max_model_len=short, groups=needs, kind=kind)
    assert shorter.max_model_len >= min(short, small.max_model_len)


@given(st.integers(2**25, 2**33), st.integers(1, 9000), st.sampled_from([16, 128, 700]), groups)
def test_what_is_planned_fits_and_serves_one_sequence_to_the_end(
    budget: int, wanted: int, chunk: int, needs: list[GroupNeed]
) -> None:
    got = plan(kv_cache_memory_bytes=budget, max_model_len=wanted, chunk=chunk, groups=needs)
    taken = [n * need.block_bytes for n, need in zip(got.num_blocks, needs, strict=True)]
    assert sum(taken) <= budget
    for need, have in zip(needs, got.num_blocks, strict=True):
        for start in range(0, got.max_model_len, 53):
            stop = min(start + chunk, got.max_model_len)
            first = max(0, start - need.window + 1) // 16 if need.window else 0
            assert have >= -(-stop // 16) - first
    if got.max_model_len < min(wanted, 8192):
        longer = min(wanted, got.max_model_len + 16)
        blocks = -(-longer // 16)
        assert budget < sum(need.block_bytes * need.blocks(blocks, chunk, 16) for need in needs)


def test_windows_make_room_for_contexts_and_for_others() -> None:
    # 1 MiB a block for layers that see everything, 5 MiB for those that see 512 tokens: 41 blocks are enough for one.
    needs = [GroupNeed(2**20), GroupNeed(5 * 2**20, 512)]
    one = plan(groups=needs, kv_cache_memory_bytes=(512 + 41 * 5) * 2**20)
    assert one == MemoryPlan((512, 41), 8192, "")
    # 400 MiB more: sixty-four sequences of equal length, of which one may be longer.
    some = plan(groups=needs, kv_cache_memory_bytes=(512 + 121 * 5) * 2**20)
    assert some.num_blocks == (512, 121)
    assert plan(groups=needs, free_bytes=2**40, share=0.9).num_blocks == (64 * 512, 64 * 41)
    assert (
        plan(groups=[GroupNeed(6 * 2**20)], kv_cache_memory_bytes=(512 + 41 * 5) * 2**20).max_model_len
        == 1904
    )


def test_a_share_replaces_the_modest_default() -> None:
    assert plan(share=0.1, max_num_seqs=1024).num_blocks == (2**34 // 10 // 2**20,)
    assert plan(share=0.5, max_num_seqs=1024).num_blocks == (2**13,)
    assert plan(share=0.5, kv_cache_memory_bytes=100 * 2**20).num_blocks == (100,)


@given(st.floats(0.001, 0.95), st.floats(0.001, 0.95), st.integers(2**33, 2**36))
def test_a_larger_share_never_fits_worse(a: float, b: float, free: int) -> None:
    small, big = (plan(free_bytes=free, share=share) for share in sorted((a, b)))
    assert grown(small, big)
    assert big.max_model_len >= small.max_model_len
