"""Which sequences of a batch begin with the same pages, and are worth reading them once for all."""

from __future__ import annotations

from dataclasses import dataclass

# Below this, two more calls and a merge per layer cost more than the pages they save.
MIN_SEQUENCES = 4
MIN_PAGES = 8

# How many branchings below each other are weighed; what branches deeper counts as one.
MAX_BRANCHINGS = 16


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `num_pages` pages of every sequence in `members` (ascending) are the same."""

    members: list[int]
    num_pages: int


def find_shared_prefixes(
    page_tables: list[list[int]], num_cached: list[int], page_size: int
) -> list[SharedPrefix]:
    """Disjoint groups of sequences that share leading pages.

    Only pages filled before the batch count (`num_cached` tokens of each sequence), so that every
    row sees all of them. Where prefixes branch, each sequence joins one group, so chosen that the
    number of page reads saved is largest.
    """
    heads = [
        (table[: cached // page_size], s)
        for s, (table, cached) in enumerate(zip(page_tables, num_cached, strict=True))
        if cached >= MIN_PAGES * page_size
    ]
    if len(heads) < MIN_SEQUENCES:
        return []
    heads.sort()
    _, found = _best_groups(heads, 0, MAX_BRANCHINGS)
    return found


def _best_groups(
    heads: list[tuple[list[int], int]], depth: int, branchings: int
) -> tuple[int, list[SharedPrefix]]:
    """Page reads saved, and the groups that save them, among sorted `heads` equal up to `depth`."""
    if len(heads) < MIN_SEQUENCES:
        return 0, []
    depth = _common_length(heads[0][0], heads[-1][0], depth)
    together = (len(heads) - 1) * depth if depth >= MIN_PAGES else 0
    apart, groups = 0, []
    start = 0
    while start < len(heads) and branchings:
        # A head that ends at `depth` branches to nowhere.
        branch = heads[start][0][depth : depth + 1]
        end = start + 1
        while end < len(heads) and heads[end][0][depth : depth + 1] == branch:
            end += 1
        if branch:
            saved, found = _best_groups(heads[start:end], depth + 1, branchings - 1)
            apart += saved
            groups += found
        start = end
    if together and together >= apart:
        return together, [SharedPrefix(sorted(s for _, s in heads), depth)]
    return apart, groups


def _common_length(first: list[int], last: list[int], known: int) -> int:
    low, high = known, min(len(first), len(last))
    while low < high:  # equal up to low; not known from high on
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
