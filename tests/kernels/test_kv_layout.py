"""How int8 pools are laid out; the others' shape is their layout."""

from __future__ import annotations

import torch

from appliance.kernels.kv_layout import KVGroup, KVLayout, codes_and_scales


def test_codes_and_scales_of_a_block_fill_its_slab_without_overlap() -> None:
    layout = KVLayout((KVGroup((0, 1, 2), 2, 80, torch.int8),), 32)
    assert layout.block_bytes(0) == 3 * 2 * 2 * 32 * (80 + 4)
    memory = torch.zeros(4 * layout.block_bytes(0), dtype=torch.uint8)
    codes, scales = codes_and_scales(layout.view(0, memory), 80)
    assert codes.shape == (4, 3, 2, 2, 32, 80)
    assert scales.shape == (4, 3, 2, 2, 32)
    codes[2] = 1
    assert int(memory.count_nonzero()) == codes[2].numel()
    scales[2].view(torch.uint8).fill_(2)
    slab = memory.view(4, -1)[2]
    assert int((slab == 1).sum()) == codes[2].numel()
    assert int((slab == 2).sum()) == scales[2].numel() * 4
    assert int(memory.count_nonzero()) == layout.block_bytes(0)
    # Codes of a head and its tokens' scales lie side by side.
    assert (slab[: 32 * 84] == torch.tensor([1] * 32 * 80 + [2] * 32 * 4)).all()
