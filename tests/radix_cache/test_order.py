"""The order of eviction against one that is computed page by page."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import Namespace, RadixCache, invariants
from tests.radix_cache.model import Directory

Prefix = tuple[int, ...]


def evict_and_compare(cache: RadixCache, directory: Directory, uses: dict[int, int]) -> None:
    """The page that goes has nothing behind it and, of such, was used least recently."""
    before = dict(directory.prefixes)
    ends = [
        page_id
        for page_id, (namespace, prefix) in before.items()
        if not any(
            other == namespace and len(longer) > len(prefix) and longer[: len(prefix)] == prefix
            for other, longer in before.values()
        )
    ]
    assert cache.evict(1) == 1
    (gone,) = before.keys() - directory.prefixes.keys()
    assert gone in ends
    assert uses[gone] == min(uses[page_id] for page_id in ends)
    # What stands before it was in use as long.
    namespace, prefix = before[gone]
    size = cache.page_size
    parent = prefix[: (len(prefix) - 1) // size * size]
    for page_id, entry in directory.prefixes.items():
        if entry == (namespace, parent):
            uses[page_id] = max(uses[page_id], uses[gone])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.integers(1, 4),
    num_pages=st.integers(8, 40),
)
def test_pages_go_least_recently_used_first_of_those_with_nothing_behind(
    seed: int, page_size: int, num_pages: int
) -> None:
    chance = random.Random(seed)
    directory = Directory(page_size)
    cache = RadixCache(num_pages, page_size, observers=[directory])
    uses: dict[int, int] = {}
    for time in range(1, 60):
        key = [chance.randrange(2) for _ in range(chance.randint(1, 5 * page_size))]
        namespace = Namespace(salt=chance.choice("ab"))
        lease = cache.match_and_lease(key, namespace)
        used = [*lease.page_ids, *([lease.tail.page_id] if lease.tail else [])]
        uses.update(dict.fromkeys(used, 2 * time))
        lease.drop_tail()
        num_missing = -(-len(key) // page_size) - lease.num_pages
        if chance.random() < 0.6 and num_missing <= cache.pages.num_free:
            own = cache.pages.allocate(num_missing)
            assert own is not None
            published = lease.publish(key, [*lease.page_ids, *own], tail=True)
            uses.update(dict.fromkeys(published.page_ids, 2 * time))
            if published.tail:
                uses[published.tail.page_id] = 2 * time
        if lease.page_ids:
            uses[lease.page_ids[-1]] = 2 * time + 1
        lease.release()
        invariants.check(cache, owned=[])
        while cache.num_evictable_pages and chance.random() < 0.3:
            evict_and_compare(cache, directory, uses)
    while cache.num_evictable_pages:
        evict_and_compare(cache, directory, uses)


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_looking_at_the_beginning_of_an_edge_again_and_again_does_not_keep_its_rest(
    num_tokens: int,
) -> None:
    cache = RadixCache(num_pages=16, page_size=4)
    for key in (list(range(1, 17)), [90] * 16):
        own = cache.allocate(4)
        assert own is not None
        cache.insert(key, own)
    for _ in range(3):
        match = cache.match(list(range(1, num_tokens + 1)))
    cache.lease(match).release()
    cache.evict(4 - -(-num_tokens // 4))
    assert cache.peek([90] * 16).num_tokens == 16
    assert cache.peek(list(range(1, 17))).num_tokens == -(-num_tokens // 4) * 4


def test_a_match_that_ends_within_an_edge_counts_as_a_use_and_a_peek_does_not() -> None:
    for look, survivor in ((RadixCache.match, 1), (RadixCache.peek, 2)):
        cache = RadixCache(num_pages=16, page_size=4)
        for token in (1, 2):
            own = cache.allocate(2)
            assert own is not None
            cache.insert([token] * 8, own)
        look(cache, [1] * 4)
        cache.evict(2)
        assert cache.peek([survivor] * 8).num_tokens == 8


def test_a_match_that_ends_in_a_partial_tail_counts_as_its_use() -> None:
    cache = RadixCache(num_pages=16, page_size=4)
    for first in (10, 20):
        own = cache.allocate(2)
        assert own is not None
        cache.insert([first, 1, 2, 3, 4, 5], own)
    cache.match([10, 1, 2, 3, 4])
    cache.evict(2)
    assert cache.peek([10, 1, 2, 3, 4, 5]).num_tokens == 6


def test_a_match_of_a_whole_edge_counts_as_the_use_of_its_end_through_a_later_split() -> None:
    cache = RadixCache(num_pages=16, page_size=4)
    for token in (1, 2):
        own = cache.allocate(2)
        assert own is not None
        cache.insert([token] * 8, own)
    cache.match([1] * 8)
    own = cache.allocate(2)
    assert own is not None
    cache.insert([1, 1, 1, 1, 9, 9, 9, 9], own)
    cache.evict(2)
    assert cache.peek([1] * 8).num_tokens == 8
    assert cache.peek([2] * 8).num_tokens == 0
