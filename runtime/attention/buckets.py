"""Which sequences of a batch go into one attention call, padded to the longest among them."""

from __future__ import annotations

from dataclasses import dataclass

# Rows longer than this get a call of their own: the call is then long against its overhead, and
# a mask for several query heads at once would be large.
MAX_PADDED_QUERIES = 64

# A further call per layer is worth it once padding would read this many keys in vain.
MAX_WASTED_KEYS = 1024


@dataclass(frozen=True, slots=True)
class Bucket:
    """`members` (ascending) each padded to `num_queries` rows over `length` keys."""

    members: list[int]
    num_queries: int
    length: int


def bucket_sequences(counts: list[int], lengths: list[int], page_size: int) -> list[Bucket]:
    """Every sequence in exactly one bucket; sequence s has `counts[s]` rows over `lengths[s]` keys.

    Long prefills are alone. The others are sorted by rows and length and cut where padding would
    waste more than a further call costs.
    """
    buckets = [
        Bucket([s], counts[s], lengths[s])
        for s in range(len(counts))
        if counts[s] > MAX_PADDED_QUERIES
    ]
    rest = [s for s in range(len(counts)) if counts[s] <= MAX_PADDED_QUERIES]
    rest.sort(key=lambda s: (counts[s], lengths[s]), reverse=True)
    start = 0
    while start < len(rest):
        longest, num_queries = lengths[rest[start]], counts[rest[start]]
        end, used = start + 1, lengths[rest[start]] * num_queries
        while end < len(rest):
            s = rest[end]
            width = max(longest, lengths[s])
            used += lengths[s] * counts[s]
            if width * num_queries * (end + 1 - start) - used > MAX_WASTED_KEYS:
                break
            longest = width
            end += 1
        members = sorted(rest[start:end])
        buckets.append(Bucket(members, num_queries, longest))
        start = end
    return buckets
