"""Random numbers that depend on (seed, position) alone. Imports no torch."""

from __future__ import annotations

from hashlib import blake2b
from struct import pack


def keyed_uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1), a function of its arguments; different streams at one position are independent."""
    digest = blake2b(pack("<QQQ", seed, position, stream), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of a request's continuation `index`; the first one has the request's own."""
    if index == 0:
        return seed
    digest = blake2b(pack("<QQ", seed, index), digest_size=8, person=b"sequence").digest()
    return int.from_bytes(digest, "little") >> 1
