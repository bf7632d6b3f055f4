"""Pools as Triton's kernels have them survive the way to the host and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from block_copies import check_round_trip
from packed_families import pack_family


@pytest.mark.parametrize(("family", "kv_dtype"), [("llama", "float16"), ("gemma3_text", "int8")])
def test_a_sequence_goes_on_where_its_blocks_come_back_to(family: str, kv_dtype: str, tmp_path: Path) -> None:
    check_round_trip(pack_family(family, tmp_path)[0], "gpu", kv_dtype)
