"""`KVCache`: which sequence holds which blocks. Imports no torch; the bytes are the runner's.

Each KV group has a pool and, of each sequence, a table. A group with a window gives a block back as soon as no token
that is still to be computed sees any of the block's, and leaves a `HOLE` in the table: what a sequence holds of it
stays bounded, however long the sequence grows. The prefix cache may still find such a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from secrets import token_bytes

from appliance.engine.blocks import BlockPool, chain_hash, most_blocks
from appliance.engine.types import HOLE, BlockCopy, BlockRef, Sequence


class KVCache:
    """Block tables of all sequences over one pool per KV group.

    Args:
        pools: one per KV group.
        block_size: tokens in a block, the same for all groups.
        windows: of each group, in tokens, a token's own included; 0: every token before it is seen.
        salt: root of the hash chains; drawn at random, so that hashes mean nothing outside this process.
    """

    def __init__(
        self,
        pools: tuple[BlockPool, ...],
        block_size: int,
        windows: tuple[int, ...] = (0,),
        salt: bytes | None = None,
    ) -> None:
        assert len(pools) == len(windows)
        self.pools = pools
        self.block_size = block_size
        self.windows = windows
        self._salt = salt or token_bytes(32)
        self.lookup_tokens_total = 0
        self.hit_tokens_total = 0

    def admit(self, seq: Sequence, spare: int, chunk: int) -> bool:
        """Give a sequence without blocks what its tokens need, sharing what the prefix cache has.

        That is, in a group with a window, what they need at once where at most `chunk` of them are computed in a step.
        Sets `num_computed` to the tokens found. At least one token is left to compute, since its logits are wanted;
        where the prompt's own log probabilities are, nothing is looked for.
        Nothing changes and False is returned where fewer than `spare` blocks would be left in a group.
        """
        assert not any(seq.tables), f"{seq.key} holds blocks already"
        num_hits, seq.tables = self._find_prefix(seq)
        seq.num_computed = num_hits * self.block_size
        for pool, table in self._places(seq):
            for block_id in _held(table):
                pool.share(block_id)
        missing = [self._reach(seq, window, chunk) - num_hits for window in self.windows]
        if any(n + spare > pool.num_available for pool, n in zip(self.pools, missing, strict=True)):
            self.release(seq)
            return False
        self._take(seq, missing)
        self.lookup_tokens_total += len(seq.tokens)
        self.hit_tokens_total += seq.num_computed
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make the tables cover `num_tokens` tokens, and the block that is written next the sequence's own.

        Returns:
            The copies to make before anything is written (a fork shares its last block until then), or None, and
            nothing changes, when a pool has too few blocks.
        """
        missing = [max(0, self._blocks_for(num_tokens) - len(table)) for table in seq.tables]
        first_written = seq.num_computed // self.block_size
        shared = [
            first_written < len(table) and pool.is_shared(table[first_written])
            for pool, table in self._places(seq)
        ]
        needed = zip(self.pools, missing, shared, strict=True)
        if any(count + copied > pool.num_available for pool, count, copied in needed):
            return None
        copies = [self._own(seq, group, first_written) for group, copied in enumerate(shared) if copied]
        self._take(seq, missing)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has no blocks, share all that `parent` holds."""
        child.tables = tuple(list(table) for table in parent.tables)
        for pool, table in self._places(child):
            for block_id in _held(table):
                pool.share(block_id)
        child.num_computed = parent.num_computed

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """Note that `num_tokens` more tokens are computed.

        The blocks that this filled become findable; those that no further token sees are given back.
        """
        before, seq.num_computed = seq.num_computed, seq.num_computed + num_tokens
        first, full = before // self.block_size, seq.num_computed // self.block_size
        self._extend_hashes(seq, full)
        for window, (pool, table) in zip(self.windows, self._places(seq), strict=True):
            for index in range(first, full):
                pool.register(table[index], seq.block_hashes[index])
            behind = slice(self._first_seen(window, before), self._first_seen(window, seq.num_computed))
            pool.release(table[behind])
            table[behind] = [HOLE] * (behind.stop - behind.start)

    def release(self, seq: Sequence) -> None:
        """Give all blocks back, the last first, so that a prefix outlives what followed it."""
        for pool, table in self._places(seq):
            pool.release(_held(reversed(table)))
        seq.tables = tuple([] for _ in self.pools)
        seq.num_computed = 0

    def forget(self, seq: Sequence) -> None:
        """Make all that a sequence ever computed unfindable, held or not, because it is not to be trusted."""
        for pool in self.pools:
            for block_hash in seq.block_hashes:
                block_id = pool.find(block_hash)
                if block_id is not None:
                    pool.forget(block_id)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants of every pool against the tables of all living sequences."""
        living = list(sequences)
        for group, pool in enumerate(self.pools):
            pool.check(_held(seq.tables[group]) for seq in living if seq.tables)
        for seq in living:
            for window, table in zip(self.windows, seq.tables, strict=bool(seq.tables)):
                assert len(table) * self.block_size >= seq.num_computed, (
                    f"{seq.key} computed more than it holds"
                )
                unseen = self._first_seen(window, seq.num_computed) if table else 0
                holes = [index for index, block_id in enumerate(table) if block_id == HOLE]
                assert holes == list(range(unseen)), (
                    f"{seq.key} has holes at {holes} of {unseen} unseen blocks"
                )

    def _places(self, seq: Sequence) -> Iterator[tuple[BlockPool, list[int]]]:
        """Each group's pool and the sequence's table in it; nothing where it has no tables."""
        return zip(self.pools, seq.tables, strict=bool(seq.tables))

    def _own(self, seq: Sequence, group: int, index: int) -> BlockCopy:
        """Replace a shared block of a table by a block of its own, to be filled by the copy returned."""
        pool, table = self.pools[group], seq.tables[group]
        taken = pool.allocate(1)
        assert taken is not None, "availability was checked before"
        copy = BlockCopy(BlockRef(group, "device", table[index]), BlockRef(group, "device", taken[0]))
        pool.release([table[index]])
        table[index] = taken[0]
        return copy

    def _take(self, seq: Sequence, counts: Many[int]) -> None:
        for count, (pool, table) in zip(counts, self._places(seq), strict=True):
            block_ids = pool.allocate(count)
            assert block_ids is not None, "availability was checked before"
            table += block_ids

    def _find_prefix(self, seq: Sequence) -> tuple[int, tuple[list[int], ...]]:
        """The number of leading blocks that need not be computed, and tables with those of them that are still seen."""
        if not self.pools[0].caching or seq.request.sampling.prompt_logprobs is not None:
            return 0, tuple([] for _ in self.pools)
        usable = (len(seq.tokens) - 1) // self.block_size
        self._extend_hashes(seq, usable)
        hashes = seq.block_hashes[:usable]
        count = self._longest_hit(hashes)
        tables = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            unseen = self._first_seen(window, count * self.block_size)
            found = [pool.find(block_hash) for block_hash in hashes[unseen:count]]
            tables.append([HOLE] * unseen + [block_id for block_id in found if block_id is not None])
        return count, tuple(tables)

    def _longest_hit(self, hashes: Many[bytes]) -> int:
        """The most leading blocks after which every group can go on: it has those that the next token sees."""
        groups = list(zip(self.pools, self.windows, strict=True))
        everything = [pool for pool, window in groups if not window]
        count = 0
        while count < len(hashes) and all(pool.find(hashes[count]) is not None for pool in everything):
            count += 1
        while True:
            missed = -1
            for pool, window in groups:
                if window:
                    seen = range(self._first_seen(window, count * self.block_size), count)
                    missed = max(
                        missed, next((i for i in reversed(seen) if pool.find(hashes[i]) is None), -1)
                    )
            if missed < 0:
                return count
            # Whoever goes on behind the missing block, and not so far that it is out of sight, sees it.
            count = missed

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        for index in range(len(seq.block_hashes), count):
            parent = seq.block_hashes[-1] if seq.block_hashes else self._salt
            tokens = seq.tokens[index * self.block_size : (index + 1) * self.block_size]
            seq.block_hashes.append(chain_hash(parent, tokens))

    def _reach(self, seq: Sequence, window: int, chunk: int) -> int:
        """How many blocks a table is long at admission."""
        whole = self._blocks_for(len(seq.tokens))
        if not window:
            return whole
        at_once = most_blocks(window - 1 + chunk, self.block_size)
        return min(whole, self._first_seen(window, seq.num_computed) + at_once)

    def _first_seen(self, window: int, position: int) -> int:
        """Index of the first block of which the token at `position` sees anything."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _held(table: Iterable[int]) -> Iterator[int]:
    return (block_id for block_id in table if block_id != HOLE)
