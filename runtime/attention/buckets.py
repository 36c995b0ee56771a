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


def bucket_sequences(counts: Sequence[int], lengths: Sequence[int], num_heads: int) -> list[Bucket]:
    """Every sequence in exactly one bucket; sequence s has `counts[s]` rows over `lengths[s]` keys.

    Long runs of rows are alone. The others are taken from the most rows and keys down, and cut
    where padding would waste more than a further call costs or the scores would grow too large.
    """
    buckets: list[Bucket] = []
    short: list[int] = []
    for s, count in enumerate(counts):
        if count > MAX_PADDED_QUERIES:
            buckets.append(Bucket([s], count, lengths[s]))
        else:
            short.append(s)
    short.sort(key=lambda s: (counts[s], lengths[s]), reverse=True)
    start = 0
    while start < len(short):
        num_queries, longest = counts[short[start]], lengths[short[start]]
        needed, end = num_queries * longest, start + 1
        while end < len(short):
            s = short[end]
            width = max(longest, lengths[s])
            padded = num_queries * width * (end + 1 - start)
            needed += counts[s] * lengths[s]
            if padded - needed > MAX_WASTED_KEYS or padded * num_heads > MAX_SCORES:
                break
            longest = width
            end += 1
        buckets.append(Bucket(sorted(short[start:end]), num_queries, longest))
        start = end
    return buckets
