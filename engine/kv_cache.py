"""`KVCache`: which sequence holds which blocks. Imports no torch; the bytes are the runner's."""

from __future__ import annotations

from collections.abc import Iterable
from secrets import token_bytes

from appliance.engine.blocks import BlockPool, chain_hash
from appliance.engine.types import BlockCopy, BlockRef, Sequence


class KVCache:
    """Block tables of all sequences over one pool per KV group.

    Args:
        pools: one per KV group.
        block_size: tokens in a block, the same for all groups.
        salt: root of the hash chains; drawn at random, so that hashes mean nothing outside this process.
    """

    def __init__(self, pools: tuple[BlockPool, ...], block_size: int, salt: bytes | None = None) -> None:
        self.pools = pools
        self.block_size = block_size
        self._salt = salt or token_bytes(32)
        self.lookup_tokens_total = 0
        self.hit_tokens_total = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be taken in every group."""
        return min(pool.num_available for pool in self.pools)

    def admit(self, seq: Sequence, spare: int) -> bool:
        """Give a sequence without blocks all that its tokens need, sharing what the prefix cache has.

        Sets `num_computed` to the tokens found. At least one token is left to compute, since its logits are wanted;
        where the prompt's own log probabilities are, nothing is looked for.
        Nothing changes and False is returned where fewer than `spare` blocks would be left in a group.
        """
        assert not any(seq.tables), f"{seq.key} holds blocks already"
        hits = self._find_prefix(seq)
        num_hits = len(hits[0])
        needed = self._blocks_for(len(seq.tokens)) - num_hits
        for pool, ids in zip(self.pools, hits, strict=True):
            for block_id in ids:
                pool.share(block_id)
        seq.tables = hits
        if self.num_available < needed + spare:
            self.release(seq)
            return False
        self._take(seq, needed)
        seq.num_computed = num_hits * self.block_size
        self.lookup_tokens_total += len(seq.tokens)
        self.hit_tokens_total += seq.num_computed
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make the tables cover `num_tokens` tokens, and the block that is written next the sequence's own.

        Returns:
            The copies to make before anything is written (a fork shares its last block until then), or None, and
            nothing changes, when a pool has too few blocks.
        """
        missing = max(0, self._blocks_for(num_tokens) - len(seq.tables[0]))
        first_written = seq.num_computed // self.block_size
        shared = [
            group
            for group, (pool, table) in enumerate(zip(self.pools, seq.tables, strict=True))
            if first_written < len(table) and pool.is_shared(table[first_written])
        ]
        if missing + bool(shared) > self.num_available:
            return None
        copies = [self._own(seq, group, first_written) for group in shared]
        self._take(seq, missing)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has no blocks, share all that `parent` has computed."""
        child.tables = tuple(list(table) for table in parent.tables)
        for pool, table in zip(self.pools, child.tables, strict=True):
            for block_id in table:
                pool.share(block_id)
        child.num_computed = parent.num_computed

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """Note that `num_tokens` more tokens are computed, and make the blocks that this filled findable."""
        first = seq.num_computed // self.block_size
        seq.num_computed += num_tokens
        full = seq.num_computed // self.block_size
        self._extend_hashes(seq, full)
        for index in range(first, full):
            for pool, table in zip(self.pools, seq.tables, strict=True):
                pool.register(table[index], seq.block_hashes[index])

    def release(self, seq: Sequence) -> None:
        """Give all blocks back, the last first, so that a prefix outlives what followed it."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.release(reversed(table))
        seq.tables = tuple([] for _ in self.pools)
        seq.num_computed = 0

    def forget(self, seq: Sequence) -> None:
        """Make the blocks of a sequence unfindable, because what they hold is not to be trusted."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            for block_id in table:
                pool.forget(block_id)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants of every pool against the tables of all living sequences."""
        living = list(sequences)
        for group, pool in enumerate(self.pools):
            pool.check(seq.tables[group] for seq in living if seq.tables)
        for seq in living:
            for table in seq.tables:
                assert len(table) * self.block_size >= seq.num_computed, (
                    f"{seq.key} computed more than it holds"
                )

    def _own(self, seq: Sequence, group: int, index: int) -> BlockCopy:
        """Replace a shared block of a table by a block of its own, to be filled by the copy returned."""
        pool, table = self.pools[group], seq.tables[group]
        taken = pool.allocate(1)
        assert taken is not None, "availability was checked before"
        copy = BlockCopy(BlockRef(group, "device", table[index]), BlockRef(group, "device", taken[0]))
        pool.release([table[index]])
        table[index] = taken[0]
        return copy

    def _take(self, seq: Sequence, count: int) -> None:
        for pool, table in zip(self.pools, seq.tables, strict=True):
            block_ids = pool.allocate(count)
            assert block_ids is not None, "availability was checked before"
            table += block_ids

    def _find_prefix(self, seq: Sequence) -> tuple[list[int], ...]:
        hits: tuple[list[int], ...] = tuple([] for _ in self.pools)
        if not self.pools[0].caching or seq.request.sampling.prompt_logprobs is not None:
            return hits
        usable = (len(seq.tokens) - 1) // self.block_size
        self._extend_hashes(seq, usable)
        for block_hash in seq.block_hashes[:usable]:
            found = [block_id for pool in self.pools if (block_id := pool.find(block_hash)) is not None]
            if len(found) < len(self.pools):
                break
            for ids, block_id in zip(hits, found, strict=True):
                ids.append(block_id)
        return hits

    def _extend_hashes(self, seq: Sequence, count: int) -> None:
        for index in range(len(seq.block_hashes), count):
            parent = seq.block_hashes[-1] if seq.block_hashes else self._salt
            tokens = seq.tokens[index * self.block_size : (index + 1) * self.block_size]
            seq.block_hashes.append(chain_hash(parent, tokens))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
