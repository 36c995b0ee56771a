"""Eviction: least recently used first, page by page from the end, never what is held."""

from __future__ import annotations

import pytest

from palmette.radix_cache import (
    Namespace,
    PageNotOwned,
    PagePool,
    PageState,
    RadixCache,
    invariants,
)
from tests.radix_cache.helpers import insert, num_cached, run, tokens


def test_an_edge_is_evicted_page_by_page_from_its_end(cache: RadixCache) -> None:
    insert(cache, tokens(1, 16))
    for left in (12, 8, 4, 0):
        assert cache.evict(1) == 1
        assert cache.explain(tokens(1, 16)).num_cached_tokens == left
    assert cache.evict(1) == 0


def test_the_least_recently_used_leaf_goes_first(cache: RadixCache) -> None:
    for first in (10, 20, 30):
        insert(cache, [first] * 4)
    cache.match([10] * 4)
    order = []
    for _ in range(3):
        cache.evict(1)
        order.append([f for f in (10, 20, 30) if cache.explain([f] * 4).num_cached_tokens])
    assert order == [[10, 30], [10], []]


def test_a_prefix_outlives_what_is_behind_it(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    insert(cache, [1, 2, 3, 4, 9, 9, 9, 9])
    cache.evict(2)
    assert num_cached(cache, tokens(1, 8)) == 4


def test_a_prefix_is_as_recent_as_the_sequence_that_was_released_last(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 4))
    pages = cache.allocate(1)
    assert pages is not None
    copy = lease.copy()
    lease.publish(tokens(1, 8), [*lease.page_ids, *pages])
    insert(cache, [9] * 4)
    copy.release()
    lease.release()
    cache.evict(1)
    assert cache.explain([9] * 4).num_cached_tokens == 0
    cache.evict(1)
    insert(cache, [8] * 4)
    assert cache.explain(tokens(1, 8)).num_cached_tokens == 4


def test_the_unused_rest_of_an_edge_is_not_kept_fresh_by_its_beginning(cache: RadixCache) -> None:
    insert(cache, tokens(1, 16))
    insert(cache, [9] * 8)
    lease = cache.match_and_lease([*tokens(1, 8), 77])
    lease.release()
    cache.evict(2)
    assert cache.explain(tokens(1, 16)).num_cached_tokens == 8
    assert cache.explain([9] * 8).num_cached_tokens == 8


def test_allocating_evicts_no_more_than_it_needs(cache: RadixCache) -> None:
    insert(cache, tokens(1, 40))
    assert cache.pages.num_free == 6
    pages = cache.allocate(8)
    assert pages is not None
    assert len(set(pages)) == 8
    assert cache.num_cached_pages == 8
    assert cache.pages.num_free == 0
    invariants.check(cache, owned=pages)


def test_an_allocation_that_cannot_succeed_changes_nothing(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    insert(cache, [9] * 40)
    assert cache.num_available == 14
    assert cache.allocate(15) is None
    assert cache.num_cached_pages == 12
    assert cache.stats.num_evicted_pages == 0
    pages = cache.allocate(14)
    assert pages is not None
    lease.release()
    invariants.check(cache, owned=pages)


def test_a_number_of_pages_below_zero_is_refused(cache: RadixCache) -> None:
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        cache.allocate(-1)
    assert cache.allocate(0) == []


def test_flushing_drops_all_that_nobody_holds(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    insert(cache, [9] * 10)
    assert cache.flush() == 3
    assert cache.stats.num_flushed_pages == 3
    assert num_cached(cache, tokens(1, 8)) == 8
    lease.release()
    assert cache.flush() == 2
    assert not cache.tree.roots


def test_flushing_one_namespace_leaves_the_others(cache: RadixCache) -> None:
    adapter = Namespace(adapter="weights-1")
    insert(cache, tokens(1, 10), adapter)
    insert(cache, [*tokens(1, 4), 9, 9, 9, 9], adapter)
    insert(cache, tokens(1, 8))
    assert cache.flush(adapter) == 4
    assert num_cached(cache, tokens(1, 8), adapter) == 0
    assert num_cached(cache, tokens(1, 8)) == 8
    assert cache.flush(Namespace(salt="unknown")) == 0
    invariants.check(cache, owned=[])


def test_touches_leases_and_tails_leave_no_garbage_in_the_queue() -> None:
    cache = RadixCache(num_pages=64, page_size=2)
    for _ in range(2_000):
        run(cache, [1, 2, 3], tail=True).release()  # a tail
        run(cache, [1, 2, 3, 4]).release()  # subsumed
        run(cache, [1, 2, 9, 9, 9, 9]).release()
        cache.evict(2)
        cache.match([1, 2, 3, 4])
    assert len(cache.tree.queue) < 100
    invariants.check(cache, owned=[])


def test_evictions_are_stamped_by_the_clock_given_and_uses_ordered_as_they_come() -> None:
    now = 7.5
    cache = RadixCache(num_pages=4, page_size=1, clock=lambda: now)
    for token in (1, 2, 3):
        insert(cache, [token])
    cache.match([1])
    now = 9.25
    cache.evict(1)
    assert [cache.explain([t]).num_cached_tokens for t in (1, 2, 3)] == [1, 0, 1]
    (stretch,) = cache.explain([2]).stretches
    assert stretch.departure is not None
    assert stretch.departure.time == 9.25


def test_a_page_is_freed_by_its_owner_and_once() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    assert pages == [0, 1]
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    for wrong, message in [
        ([2], "page 2 is free"),
        ([0, 0], "page 0 is named twice"),
        ([0, 4], "page 4 is not one of the pool's 4"),
        ([-1], "page -1 is not one of the pool's 4"),
    ]:
        with pytest.raises(PageNotOwned, match=message):
            pool.free(wrong)
        assert pool.owned() == [0, 1]
    pool.free(pages)
    with pytest.raises(PageNotOwned, match="page 0 is free"):
        pool.free(pages)
    assert pool.num_free == 4
    assert pool.state(3) is PageState.FREE
    with pytest.raises(IndexError, match="page 4 is not one of the pool's 4"):
        pool.state(4)
