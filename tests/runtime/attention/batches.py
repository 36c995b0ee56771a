"""Random paged batches for the attention tests, from small numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool

PAGE_SIZE = 4
HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """A batch, a pool already filled with random keys and values, and random queries."""

    batch: ForwardBatch
    kv: KVPool
    queries: torch.Tensor


def make_case(
    sequences: list[tuple[int, int, list[int]]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_pages: int = 512,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`sequences` are (cached tokens, rows of this batch, page table)."""
    generator = torch.Generator().manual_seed(seed)
    kv = KVPool(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )
    every_slot = torch.arange(num_pages * PAGE_SIZE)
    content = torch.randn(len(every_slot), 2 * num_kv_heads, HEAD_DIM, generator=generator)
    kv.write(0, every_slot, content.to(dtype))
    positions = [p for cached, rows, _ in sequences for p in range(cached, cached + rows)]
    starts = [0]
    for _, rows, _ in sequences:
        starts.append(starts[-1] + rows)
    batch = ForwardBatch(
        token_ids=[0] * len(positions),
        positions=positions,
        slots=[0] * len(positions),
        query_starts=starts,
        context_lengths=[cached + rows for cached, rows, _ in sequences],
        page_tables=[table for _, _, table in sequences],
        logit_rows=[end - 1 for end in starts[1:]],
    )
    queries = torch.randn(len(positions), num_heads, HEAD_DIM, generator=generator).to(dtype)
    return Case(batch, kv, queries)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches that mix prefill, extend and decode, where some sequences share leading pages."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3]))
    free = random.Random(draw(st.integers(0, 1000))).sample(range(512), 512)
    next_free = 0

    def take(count: int) -> list[int]:
        nonlocal next_free
        next_free += count
        return free[next_free - count : next_free]

    prefixes = [
        take(draw(st.sampled_from([0, 3, 11, 48, 50]))) for _ in range(draw(st.integers(1, 2)))
    ]
    sequences: list[tuple[int, int, list[int]]] = []
    for _ in range(draw(st.integers(1, 10))):
        prefix = draw(st.sampled_from(prefixes))
        cached = len(prefix) * PAGE_SIZE + draw(st.integers(0, 9))
        rows = draw(st.one_of(st.just(1), st.integers(1, 7), st.integers(30, 45)))
        num_pages = -(-(cached + rows) // PAGE_SIZE)
        spare = draw(st.integers(0, 1))  # a table may be longer than the context needs
        sequences.append((cached, rows, prefix + take(num_pages - len(prefix) + spare)))
    if draw(st.booleans()):  # as a pool that was never fragmented
        sequences = [(cached, rows, sorted(table)) for cached, rows, table in sequences]
    return make_case(
        sequences,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        seed=draw(st.integers(0, 1000)),
    )
