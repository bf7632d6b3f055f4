"""`BlockPool`: reference-counted blocks of KV memory and the prefix cache over them. Imports no torch.

A block is used (referenced), cached (unreferenced, but findable by the hash of its tokens) or free. Allocation takes
free blocks first, then the least recently released cached one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from struct import pack


@dataclass(slots=True)
class Block:
    """One place in a pool. `hash` is set while its contents are complete and findable."""

    id: int
    refs: int = 0
    hash: bytes | None = None


class BlockPool:
    """The blocks of one KV group in one tier.

    Args:
        num_blocks: capacity.
        caching: keep released blocks findable by hash; without it nothing is ever found.
    """

    def __init__(self, num_blocks: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free or merely cached."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks with one reference each, or None (and nothing is taken) when there are not enough."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds the tokens of this hash, used or cached; takes no reference."""
        return self._by_hash.get(block_hash)

    def share(self, block_id: int) -> None:
        """Take one more reference to a block that is used or cached."""
        block = self._blocks[block_id]
        assert block.refs > 0 or block_id in self._cached, f"block {block_id} is free and cannot be shared"
        if block.refs == 0:
            del self._cached[block_id]
        block.refs += 1

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one table holds the block, so that nobody may write to it."""
        return self._blocks[block_id].refs > 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back one reference each; the first given back is the first to be reused."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            assert block.refs > 0, f"block {block_id} was released more often than taken"
            block.refs -= 1
            if block.refs == 0:
                (self._free if block.hash is None else self._cached)[block_id] = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a used block findable. Where another block holds the same tokens already, that one stays the answer."""
        block = self._blocks[block_id]
        assert block.refs > 0, f"block {block_id} is not used"
        if self.caching and block.hash is None and block_hash not in self._by_hash:
            block.hash = block_hash
            self._by_hash[block_hash] = block_id

    def forget(self, block_id: int) -> None:
        """Make a used or cached block unfindable; a cached one is free then."""
        self._unhash(self._blocks[block_id])
        if block_id in self._cached:
            del self._cached[block_id]
            self._free[block_id] = None

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert every invariant, given the block tables that are supposed to hold all references."""
        refs = [0] * self.num_blocks
        for block_id in chain.from_iterable(tables):
            refs[block_id] += 1
        for block in self._blocks:
            assert block.refs == refs[block.id], (
                f"block {block.id}: {block.refs} references, {refs[block.id]} in tables"
            )
            places = (block.refs > 0) + (block.id in self._free) + (block.id in self._cached)
            assert places == 1, f"block {block.id} is in {places} of used, free and cached"
            assert (block.id in self._cached) <= (block.hash is not None), (
                f"cached block {block.id} has no hash"
            )
            assert block.hash is None or self._by_hash[block.hash] == block.id, (
                f"block {block.id} is not findable"
            )
        assert len(self._by_hash) == sum(block.hash is not None for block in self._blocks)

    def _take(self) -> int:
        block_id, _ = (self._free or self._cached).popitem(last=False)
        block = self._blocks[block_id]
        self._unhash(block)
        block.refs = 1
        return block_id

    def _unhash(self, block: Block) -> None:
        if block.hash is not None:
            del self._by_hash[block.hash]
            block.hash = None


def most_blocks(num_tokens: int, block_size: int) -> int:
    """The most blocks that `num_tokens` consecutive tokens, at least one, can lie in."""
    return 1 + -(-(num_tokens - 1) // block_size)


def chain_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """Hash of a full block given the hash of the one before it (the first one's parent is the pool's salt).

    Keyed and cryptographic, so that nobody can construct a prompt that finds another prompt's blocks.
    """
    ids = tuple(token_ids)
    return blake2b(pack(f"<{len(ids)}I", *ids), key=parent, digest_size=32).digest()
