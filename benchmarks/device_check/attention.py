"""Paged attention: against float64, the same bits by decoding and by prefill, and time over slabs and over layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from appliance.kernels.kv_layout import KVGroup, KVLayout, codes_and_scales
from appliance.kernels.paged_attention import kv_write
from appliance.kernels.paged_attention.gpu import paged_attention
from appliance.kernels.qkv.gpu import finish_qkv
from benchmarks.device_check.bandwidth import Peaks
from benchmarks.device_check.report import Row, error, short
from benchmarks.device_check.sizes import Sizes
from benchmarks.device_check.timing import seconds

_BLOCK = 16
_LAYER, _LAYERS = 1, 2
_UNWRITTEN = 0xFF


@dataclass(frozen=True)
class Case:
    name: str
    group: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    int8: bool = False


CASES = (
    Case("Llama", 4, 2, 128),
    Case("Llama, int8", 4, 2, 128, int8=True),
    Case("SmolLM2", 3, 3, 64),
    Case("Phi 3, window", 1, 2, 96, window=70),
    Case("Gemma 2", 2, 2, 256, window=300, softcap=50.0),
    Case("Gemma 2, int8", 2, 2, 256, window=300, softcap=50.0, int8=True),
    Case("gpt-oss", 8, 1, 64, window=128, sinks=True),
)
Part = tuple[int, int, int]
"""A sequence, and the positions of its first token in the batch and after the last."""


class Memory:
    """Sequences whose keys and values lie in shuffled blocks, all else of the pool being no numbers."""

    def __init__(self, case: Case, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self.heads, self.scale = case.group * case.kv_heads, 2 * case.head_dim**-0.5
        counts = [-(-length // _BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 2).tolist()
        self.tables = [
            order[stop - count : stop] for stop, count in zip(accumulate(counts), counts, strict=True)
        ]
        kv_dtype = torch.int8 if case.int8 else dtype
        layout = KVLayout((KVGroup(tuple(range(_LAYERS)), case.kv_heads, case.head_dim, kv_dtype),), _BLOCK)
        num_bytes = len(order) * layout.block_bytes(0)
        self.pool = layout.view(0, torch.full((num_bytes,), _UNWRITTEN, dtype=torch.uint8, device=device))
        self.sinks = torch.randn(self.heads, device=device) if case.sinks else None
        self.queries = [self._random(length, self.heads).to(dtype) for length in lengths]
        self.exact = [self._write(table, length) for table, length in zip(self.tables, lengths, strict=True)]

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.case.head_dim, device=self.device)

    def _write(self, table: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random keys and values of a sequence; as they are there, float64 [length, kv_heads, head_dim]."""
        position = torch.arange(length, device=self.device)
        blocks = torch.tensor(table, device=self.device)[position // _BLOCK]
        at = (blocks, position % _BLOCK)
        keys, values = (self._random(length, self.case.kv_heads).to(self.dtype) for _ in range(2))
        if not self.case.int8:
            kv_write(self.pool, _LAYER, keys, values, *at)
            return keys.double(), values.double()
        codes, scales = codes_and_scales(self.pool, self.case.head_dim)
        shape = (length, self.case.kv_heads, self.case.head_dim)
        exact = []
        for part in range(2):
            code = torch.randint(-127, 128, shape, dtype=torch.int8, device=self.device)
            scale = torch.rand(shape[:2], device=self.device) * 0.03
            codes[at[0], _LAYER, part, :, at[1]] = code
            scales[at[0], _LAYER, part, :, at[1]] = scale
            exact.append(code.double() * scale.double().unsqueeze(-1))
        return exact[0], exact[1]

    def run(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Attention of the parts in one batch."""
        counts = [stop - start for _, start, stop in parts]
        width = -(-max(map(len, self.tables)) // 16) * 16
        tables = torch.full((len(parts), width), 10**6, dtype=torch.int32)
        for table, (sequence, _, stop) in zip(tables, parts, strict=True):
            used = self.tables[sequence][: -(-stop // _BLOCK)]
            table[: len(used)] = torch.tensor(used)
        q = torch.cat([self.queries[sequence][start:stop] for sequence, start, stop in parts])
        out = torch.full_like(q, math.nan)
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        contexts = torch.tensor([stop for *_, stop in parts], dtype=torch.int32)
        where = (tables.to(self.device), starts.to(self.device), contexts.to(self.device), counts)
        case = self.case
        paged_attention(out, q, self.pool, _LAYER, *where, self.scale, case.window, case.softcap, self.sinks)
        return list(out.split(counts))

    def expected(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        case = self.case
        keys, values = (each[:stop] for each in self.exact[sequence])
        q = self.queries[sequence][start:stop].double().view(-1, case.kv_heads, case.group, case.head_dim)
        scores = torch.einsum("nkgd,tkd->nkgt", q, keys) * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        token, key = torch.arange(start, stop)[:, None], torch.arange(stop)[None, :]
        hidden = (key > token) | ((key <= token - case.window) if case.window else False)
        scores = scores.masked_fill(hidden.to(self.device)[:, None, None, :], -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.double().view(1, case.kv_heads, case.group, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
        weights = scores.softmax(-1)[..., :stop]
        return torch.einsum("nkgt,tkd->nkgd", weights, values).reshape(-1, self.heads, case.head_dim)

    def error(self, parts: Sequence[Part]) -> float:
        """As a share of the tolerance: weights and the result are rounded once each."""
        found = 0.0
        for got, part in zip(self.run(parts), parts, strict=True):
            largest = max(float(each.abs().max()) for each in self.exact[part[0]])
            in_float32 = 2.0**-18 * max(1.0, self.case.softcap)
            tolerance = largest * (torch.finfo(self.dtype).eps + in_float32)
            difference = (got.double() - self.expected(*part)).abs().nan_to_num(math.inf).max()
            found = max(found, float(difference) / tolerance)
        return found


def attention_parity(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Iterator[Row]:
    lengths = sizes.contexts
    last: list[Part] = [(s, length - 1, length) for s, length in enumerate(lengths)]
    whole: list[Part] = [(s, 0, length) for s, length in enumerate(lengths)]
    chunks: list[Part] = [(s, length // 2, length) for s, length in enumerate(lengths)]
    for case in CASES:
        if sizes.attention_cases is not None and case.name not in sizes.attention_cases:
            continue
        memory = Memory(case, lengths, dtype, device)
        yield error(f"{case.name}, decode", memory.error(last))
        yield error(f"{case.name}, prefill", memory.error(whole))
        alone = torch.stack([memory.run([part])[0][-1] for part in last])
        rows = [torch.stack([part[-1] for part in memory.run(parts)]) for parts in (last, whole, chunks)]
        different = sum(int((each != alone).sum()) for each in rows)
        yield error(f"{case.name}, last rows decoded, prefilled, in chunks, alone", different, "other", 0.0)


def attention(device: torch.device, sizes: Sizes, peaks: Peaks) -> Iterator[Row]:
    """A step's attention, layer after layer, so that none finds its keys in the cache."""
    dtype = sizes.dtypes[0]
    for kv_dtype in (dtype, torch.int8):
        for context in sizes.decode_contexts:
            for batch in sizes.batches:
                if batch * context > 32 * 4096:
                    continue
                label = f"decode, {batch} × {context:,} tokens, {short(kv_dtype)} KV"
                yield from _timed(label, batch, context, 1, kv_dtype, device, sizes, peaks)
        label = f"prefill, {sizes.prefill:,} tokens, {short(kv_dtype)} KV"
        yield from _timed(label, 1, sizes.prefill, sizes.prefill, kv_dtype, device, sizes, peaks)


def _timed(
    label: str,
    batch: int,
    context: int,
    queries: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    sizes: Sizes,
    peaks: Peaks,
) -> Iterator[Row]:
    """Of one layer: over slabs of all layers, and over a pool for each layer; and the write before it."""
    per_sequence = -(-context // _BLOCK)
    tables = torch.randperm(batch * per_sequence).to(device, torch.int32).view(batch, -1)
    starts = torch.arange(0, batch + 1, dtype=torch.int32, device=device) * queries
    contexts = torch.full((batch,), context, dtype=torch.int32, device=device)
    heads, head_dim = sizes.kv_heads * sizes.group, sizes.head_dim
    q = torch.randn(batch * queries, heads, head_dim, device=device).to(sizes.dtypes[0])
    out = torch.empty_like(q)
    group = KVGroup(tuple(range(sizes.layers)), sizes.kv_heads, head_dim, kv_dtype)
    layout = KVLayout((group,), _BLOCK)
    memory = torch.zeros(tables.numel() * layout.block_bytes(0), dtype=torch.uint8, device=device)
    slabs = layout.view(0, memory)
    # The same memory, as much of it for each layer.
    by_layer = memory.view(slabs.dtype).view(sizes.layers, len(slabs), 1, *slabs.shape[2:])

    def attend(pool: torch.Tensor, layer: int) -> Callable[[], None]:
        where = (tables, starts, contexts, [queries] * batch)
        return lambda: paged_attention(out, q, pool, layer, *where, head_dim**-0.5)

    token = 2 * sizes.kv_heads * group.token_bytes
    seen = batch * (queries * context - queries * (queries - 1) // 2)
    floor = peaks.floor(batch * context * token, 4 * seen * heads * head_dim)
    bound = None if floor is None else floor * 1e6
    layers = range(sizes.layers)
    taken = seconds([attend(slabs, layer) for layer in layers], device, sizes.repeats)
    yield Row(f"{label}, slabs", taken * 1e6, "µs", bound)
    taken = seconds([attend(pool, 0) for pool in by_layer], device, sizes.repeats)
    yield Row(f"{label}, layer-major", taken * 1e6, "µs", bound)
    qkv = torch.randn(len(q), (heads + 2 * sizes.kv_heads) * head_dim, device=device).to(q.dtype)
    positions = torch.arange(context - queries, context, dtype=torch.int32, device=device).repeat(batch)
    sequences = torch.arange(len(q), device=device) // queries
    into, offsets = tables[sequences, (positions // _BLOCK).long()], positions % _BLOCK

    def write(layer: int) -> Callable[[], None]:
        return lambda: finish_qkv(out, qkv, slabs, layer, positions, into, offsets)

    floor = peaks.floor(qkv.nbytes + out.nbytes + len(q) * token)
    taken = seconds([write(layer) for layer in layers], device, sizes.repeats)
    yield Row(f"{label}: the write before", taken * 1e6, "µs", None if floor is None else floor * 1e6)
