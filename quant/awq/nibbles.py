"""4-bit codes in int32 words into another order, a whole word at a time.

Masked shifts run at the speed of the cache, so words are turned in chunks that stay in it, with their long side last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Fewer elements than this are one thread's work to torch. Whole chunks to a thread are better than parts of every
# operation: on a busy machine, waiting for the slowest after each takes ten times as long.
CHUNK_WORDS = 1 << 15
# Which half of a word changes places with its neighbour's, from halves down to nibbles.
_STAGES = ((16, 0x0000FFFF_0000FFFF), (8, 0x00FF00FF_00FF00FF), (4, 0x0F0F0F0F_0F0F0F0F))


def in_parallel(
    work: Callable[[torch.Tensor, torch.Tensor], None], chunks: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """`work(source, target)` for each chunk, on as many threads as torch uses."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(work, source, target) for source, target in chunks]:
            done.result()


def transpose_squares(words: torch.Tensor) -> None:
    """int32 [B, R, M], in place: each R words, 4 or 8, are a matrix of R x R bytes or nibbles.

    Hacker's Delight (Warren), 7-3; two at a time where M is even.
    """
    height = words.shape[1]
    if words.shape[2] % 2 == 0 and words.stride(1) % 2 == 0:
        words = words.view(torch.int64)
    temporary = words.new_empty(words.numel() // 2)
    for shift, mask in _STAGES[: height.bit_length() - 1]:
        pairs = words.view(len(words), -1, 2, shift * height // 32, words.shape[2])
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        swap = temporary.view(low.shape)
        torch.bitwise_right_shift(low, shift, out=swap)
        swap.bitwise_xor_(high).bitwise_and_(mask & torch.iinfo(words.dtype).max)
        high.bitwise_xor_(swap)
        low.bitwise_xor_(swap.bitwise_left_shift_(shift))


def pair_nibbles(words: torch.Tensor) -> None:
    """int32, in place: byte i becomes what nibble i was (low) and nibble i + 4 (high)."""
    for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        swap = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
        words.bitwise_xor_(swap)
        words.bitwise_xor_(swap.bitwise_left_shift_(shift))


def unpack_nibbles(words: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """int32 [R, M] → uint8 [R, 8 * M]; `order[i]` is the place of nibble i among its eight."""
    shifts = torch.empty(8, dtype=torch.int32)
    shifts[list(order)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).view(len(words), -1)
