"""How KV memory is laid out: one block is one contiguous slab over all layers of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appliance.kernels.memory import anonymous

# Whole blocks fit between the boundaries at which attention splits a context.
BLOCK_SIZES = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same kind of memory.

    Attributes:
        layers: indices of the decoder layers in the group, in order.
        kv_heads, head_dim: shape of one token's keys (and of its values) in one layer.
        dtype: element type of keys and values.
        window: a token sees itself and window - 1 tokens before it, in all layers of the group; 0: all.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer and head; int8 ones have a float32 scale."""
        return self.head_dim * self.dtype.itemsize + (4 if self.dtype is torch.int8 else 0)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shapes of the pools: `[block, layer, 2, kv_head, token, head_dim]`, index 0 of the 2 being keys.

    So a block is the one unit of allocation, sharing, swapping and giving back. Of int8 pools, the last two dimensions
    are one: codes [token, head_dim], and behind them as bytes their float32 scales [token].
    """

    groups: tuple[KVGroup, ...]
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}, expected one of {BLOCK_SIZES}")

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of `group`: `block_size` tokens of keys and values in all its layers."""
        g = self.groups[group]
        return len(g.layers) * 2 * g.kv_heads * self.block_size * g.token_bytes

    def allocate(self, group: int, num_blocks: int) -> torch.Tensor:
        """A zeroed pool in host memory; its pages take no memory before they are written."""
        return self.view(group, anonymous(num_blocks * self.block_bytes(group)))

    def view(self, group: int, memory: torch.Tensor) -> torch.Tensor:
        """Memory of some blocks, uint8, as a pool."""
        g = self.groups[group]
        tokens = (self.block_size, g.head_dim)
        of_head = (self.block_size * g.token_bytes,) if g.dtype is torch.int8 else tokens
        return memory.view(g.dtype).view(-1, len(g.layers), 2, g.kv_heads, *of_head)

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index within the group) of a decoder layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(f"layer {layer} is in no KV group")


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [block, block_bytes]."""
    return pool.flatten(1).view(torch.uint8)


def codes_and_scales(pool: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of an int8 pool, of which code · scale is a key or value.

    Returns:
        int8 [block, layer, 2, kv_head, token, head_dim] and float32 [block, layer, 2, kv_head, token].
    """
    tokens = pool.shape[-1] // (head_dim + 4)
    codes = pool[..., : tokens * head_dim].view(*pool.shape[:-1], tokens, head_dim)
    return codes, pool.view(torch.float32)[..., tokens * head_dim // 4 :]
