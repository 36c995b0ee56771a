"""Which sequences of a batch go into one attention call, padded to the longest among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# More rows than this get a call of their own, which needs no mask but on its diagonal.
MAX_PADDED_QUERIES = 32

# A further call costs about as much as reading this many keys in vain (30 us, measured).
MAX_WASTED_KEYS = 1024

# Scores of one call, over all heads: 8 MiB of float32, within the last-level cache.
MAX_SCORES = 1 << 21


@dataclass(frozen=True, slots=True)
class Bucket:
    """`members` (ascending) each padded to `num_queries` rows over `length` keys."""

    members: list[int]
    num_queries: int
    length: int


def bucket_sequences(
    counts: Sequence[int], lengths: Sequence[int], num_heads: int, num_shared_keys: int = 0
) -> list[Bucket]:
    """Every sequence in exactly one bucket; sequence s has `counts[s]` rows over `lengths[s]` keys.

    They are taken from the most rows and keys down, and cut where padding would waste more than a
    further call costs, or where the scores, with those of `num_shared_keys` keys that all see
    besides, would grow too large.
    """
    buckets: list[Bucket] = []
    order = sorted(range(len(counts)), key=lambda s: (counts[s], lengths[s]), reverse=True)
    start = 0
    while start < len(order):
        num_queries, longest = counts[order[start]], lengths[order[start]]
        needed, end = num_queries * longest, start + 1
        while end < len(order):
            s = order[end]
            width = max(longest, lengths[s])
            num_rows = num_queries * (end + 1 - start)
            needed += counts[s] * lengths[s]
            num_scores = num_rows * num_heads * (width + num_shared_keys)
            if num_rows * width - needed > MAX_WASTED_KEYS or num_scores > MAX_SCORES:
                break
            longest = width
            end += 1
        buckets.append(Bucket(sorted(order[start:end]), num_queries, longest))
        start = end
    return buckets
