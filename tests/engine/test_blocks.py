"""BlockPool against a model that keeps plain lists and recomputes everything."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from appliance.engine.blocks import BlockPool, chain_hash


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a brute-force model of it."""

    tables = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 12), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, caching=caching)
        self.caching = caching
        self.held: list[list[int]] = []
        self.free = list(range(num_blocks))
        self.cached: list[int] = []
        self.hash_of: dict[int, bytes] = {}

    @rule(target=tables, count=st.integers(0, 5))
    def allocate(self, count: int) -> object:
        got = self.pool.allocate(count)
        if count > len(self.free) + len(self.cached):
            assert got is None
            return multiple()
        expected = [self._model_take() for _ in range(count)]
        assert got == expected
        self.held.append(expected)
        return expected

    @rule(table=tables)
    def release(self, table: list[int]) -> None:
        if not any(table is held for held in self.held):
            return
        self.held = [held for held in self.held if held is not table]
        self.pool.release(reversed(table))
        for block in reversed(table):
            if not any(block in held for held in self.held):
                (self.cached if block in self.hash_of else self.free).append(block)

    @rule(table=tables, key=st.binary(min_size=1, max_size=1), place=st.integers(0, 4))
    def register(self, table: list[int], key: bytes, place: int) -> None:
        if not any(table is held for held in self.held) or place >= len(table):
            return
        block = table[place]
        self.pool.register(block, key)
        if self.caching and block not in self.hash_of and key not in self.hash_of.values():
            self.hash_of[block] = key

    @rule(target=tables, key=st.binary(min_size=1, max_size=1))
    def find_and_share(self, key: bytes) -> object:
        expected = next((block for block, its in self.hash_of.items() if its == key), None)
        found = self.pool.find(key)
        assert found == expected
        if found is None:
            return multiple()
        self.pool.share(found)
        if found in self.cached:
            self.cached.remove(found)
        table = [found]
        self.held.append(table)
        return table

    @rule(table=tables)
    def forget(self, table: list[int]) -> None:
        if not any(table is held for held in self.held):
            return
        for block in table:
            self.pool.forget(block)
            self.hash_of.pop(block, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.held)
        assert (self.pool.num_free, self.pool.num_cached) == (len(self.free), len(self.cached))
        assert self.pool.num_used == len({block for held in self.held for block in held})

    def _model_take(self) -> int:
        if self.free:
            return self.free.pop(0)
        block = self.cached.pop(0)
        del self.hash_of[block]
        return block


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_releasing_a_block_twice_is_caught() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    assert table is not None
    pool.release(table)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(table)


def test_check_sees_a_reference_that_no_table_holds() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 in tables"):
        pool.check([])


def test_hash_depends_on_every_token_and_on_what_came_before() -> None:
    salt = b"s" * 32
    first = chain_hash(salt, [1, 2, 3])
    assert first == chain_hash(salt, (1, 2, 3))
    others = {chain_hash(salt, [1, 2, 4]), chain_hash(first, [1, 2, 3]), chain_hash(b"t" * 32, [1, 2, 3])}
    assert len(others | {first}) == 4
