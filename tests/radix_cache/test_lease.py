"""Leases: what they keep, through splits and evictions, and their one release."""

from __future__ import annotations

import pytest

from palmette.radix_cache import LeaseReleased, Namespace, RadixCache, StaleMatch, Tail, invariants
from tests.radix_cache.helpers import insert, num_cached, run, tokens


def test_what_is_leased_is_not_evicted_and_the_rest_of_the_edge_is(cache: RadixCache) -> None:
    insert(cache, tokens(1, 16))
    lease = cache.match_and_lease(tokens(1, 8))
    assert (lease.num_tokens, lease.num_pages) == (8, 2)
    assert cache.num_available == 14
    assert cache.evict(100) == 2
    assert num_cached(cache, tokens(1, 16)) == 8
    lease.release()
    assert cache.evict(100) == 2


def test_a_lease_survives_a_split_of_what_it_holds(cache: RadixCache) -> None:
    insert(cache, tokens(1, 12))
    lease = cache.match_and_lease(tokens(1, 12))
    insert(cache, [1, 2, 3, 4, 9, 9, 9, 9])
    insert(cache, [*tokens(1, 8), 9, 9, 9, 9])
    assert cache.evict(100) == 2
    assert cache.match(tokens(1, 12)).page_ids == lease.page_ids
    invariants.check(cache, owned=[])
    lease.release()
    invariants.check(cache, owned=[])
    assert cache.evict(100) == 3


def test_a_second_release_raises(cache: RadixCache) -> None:
    insert(cache, tokens(1, 4))
    lease = cache.match_and_lease(tokens(1, 4))
    lease.release()
    assert lease.is_released
    with pytest.raises(LeaseReleased, match="release: it was released before"):
        lease.release()
    assert cache.num_available == 16
    invariants.check(cache)


def test_a_released_lease_can_do_nothing(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    lease.release()
    for act in (
        lambda: lease.publish([], []),
        lambda: lease.drop_tail(),
        lambda: lease.advance([]),
        lambda: lease.copy(),
        lambda: lease.logprobs(),
        lambda: lease.set_logprobs(0, []),
        lambda: lease.__enter__(),
    ):
        with pytest.raises(LeaseReleased):
            act()


def test_a_with_block_releases_once_also_after_an_error_or_an_early_release(
    cache: RadixCache,
) -> None:
    insert(cache, tokens(1, 8))
    with cache.match_and_lease(tokens(1, 8)) as lease:
        assert cache.num_available == 14
    assert lease.is_released
    with pytest.raises(KeyError), cache.match_and_lease(tokens(1, 8)) as lease:
        raise KeyError
    assert lease.is_released
    with cache.match_and_lease(tokens(1, 8)) as lease:
        lease.release()
    assert cache.num_available == 16


def test_two_leases_on_one_prefix_are_two_holds(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    one = cache.match_and_lease(tokens(1, 8))
    other = cache.match_and_lease(tokens(1, 4))
    one.release()
    assert cache.evict(100) == 1
    other.release()
    assert cache.evict(100) == 1


def test_a_lease_holds_the_page_of_its_tail_until_it_drops_it(cache: RadixCache) -> None:
    first, second, _, _ = insert(cache, tokens(1, 16)).page_ids
    lease = cache.match_and_lease([1, 2, 3, 4, 5, 6, 99])
    assert lease.tail == Tail(second, 2)
    assert cache.evict(100) == 2
    lease.drop_tail()
    assert (lease.tail, lease.page_ids, lease.num_tokens) == (None, (first,), 4)
    lease.drop_tail()  # nothing is left to drop
    assert cache.evict(100) == 1
    lease.release()


def test_a_lease_holds_the_page_of_a_partial_tail(cache: RadixCache) -> None:
    insert(cache, tokens(1, 6))
    lease = cache.match_and_lease(tokens(1, 6))
    assert cache.evict(100) == 0
    lease.release()
    assert cache.evict(100) == 2


def test_a_match_that_was_evicted_cannot_be_leased(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    match = cache.match(tokens(1, 8))
    cache.evict(1)
    with pytest.raises(StaleMatch, match="match of 8 tokens is out of date"):
        cache.lease(match)
    invariants.check(cache, owned=[])


def test_a_match_whose_tokens_are_in_another_page_now_cannot_be_leased(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    match = cache.match(tokens(1, 8))
    cache.evict(1)
    other = cache.allocate(2)
    assert other is not None
    cache.insert(tokens(1, 8), [match.page_ids[0], other[1]])
    with pytest.raises(StaleMatch):
        cache.lease(match)


@pytest.mark.parametrize("stored", [tokens(1, 6), tokens(1, 8)])
def test_a_match_whose_tail_alone_was_evicted_cannot_be_leased(
    cache: RadixCache, stored: list[int]
) -> None:
    holder = run(cache, tokens(1, 4))
    insert(cache, stored)
    match = cache.match([*tokens(1, 6), 99])
    assert match.num_tokens == 6
    assert cache.evict(1) == 1
    with pytest.raises(StaleMatch):
        cache.lease(match)
    holder.release()
    invariants.check(cache, owned=[])


def test_a_match_can_be_leased_after_splits_and_after_evictions_elsewhere(
    cache: RadixCache,
) -> None:
    insert(cache, tokens(1, 12))
    match = cache.match([*tokens(1, 6), 99])
    insert(cache, [1, 2, 3, 4, 8, 8, 8, 8])
    insert(cache, [*tokens(1, 8), 9, 9, 9, 9])
    cache.evict(1)  # the last page of 1..12
    lease = cache.lease(match)
    assert (lease.page_ids, lease.tail) == (match.page_ids, match.tail)
    invariants.check(cache, owned=[])


def test_a_match_of_nothing_can_be_leased_whenever(cache: RadixCache) -> None:
    empty = cache.match(tokens(1, 4))
    run(cache, tokens(1, 8)).release()
    other = cache.match([9, 9])
    cache.flush()
    for match in (empty, other):
        lease = cache.lease(match)
        assert (lease.num_tokens, lease.page_ids) == (0, ())
        lease.release()
    invariants.check(cache, owned=[])


def test_a_match_of_another_cache_is_refused(cache: RadixCache) -> None:
    other = RadixCache(num_pages=16, page_size=4)
    insert(other, tokens(1, 8))
    for key in (tokens(1, 8), [9]):
        with pytest.raises(ValueError, match="the match is one of another cache"):
            cache.lease(other.match(key))


def test_a_copy_of_a_lease_is_released_on_its_own(cache: RadixCache) -> None:
    insert(cache, tokens(1, 6))
    lease = cache.match_and_lease(tokens(1, 6))
    copy = lease.copy()
    lease.release()
    assert (copy.num_tokens, copy.tail) == (6, lease.tail or copy.tail)
    assert cache.evict(100) == 0
    copy.release()
    assert cache.evict(100) == 2


def test_a_waiting_sequence_takes_up_what_another_published_since(cache: RadixCache) -> None:
    waiting = cache.match_and_lease(tokens(1, 10))
    running = run(cache, tokens(1, 6))
    assert waiting.advance(tokens(1, 10)) == 4
    pages = cache.allocate(2)
    assert pages is not None
    running.publish(tokens(1, 10), [*running.page_ids, *pages], tail=True)
    assert waiting.advance(tokens(1, 10)) == 6
    assert waiting.page_ids == running.page_ids
    assert waiting.tail == running.tail
    assert waiting.advance(tokens(1, 10)) == 0
    with pytest.raises(ValueError, match="4 tokens given, the lease holds 2 pages"):
        waiting.advance(tokens(1, 4))
    running.release()
    assert cache.evict(100) == 0
    waiting.release()


def test_advancing_by_other_tokens_lets_the_old_tail_go(cache: RadixCache) -> None:
    insert(cache, tokens(1, 6))
    lease = cache.match_and_lease(tokens(1, 6))
    assert lease.tail is not None
    assert lease.advance([1, 2, 3, 4, 9, 9]) == -2
    assert (lease.num_tokens, lease.tail) == (4, None)
    assert cache.evict(100) == 1  # nothing holds the tail
    lease.release()


def test_advancing_by_fewer_tokens_shortens_the_tail(cache: RadixCache) -> None:
    insert(cache, tokens(1, 7))
    lease = cache.match_and_lease(tokens(1, 7))
    assert lease.advance([*tokens(1, 6), 9]) == -1
    assert lease.tail is not None
    assert lease.tail.num_tokens == 2
    assert cache.evict(100) == 0
    assert lease.advance(tokens(1, 4)) == -2
    assert lease.tail is None
    lease.release()


def test_leases_keep_namespaces_apart(cache: RadixCache) -> None:
    lease = cache.match_and_lease([], Namespace(salt="a"))
    pages = cache.allocate(1)
    assert pages is not None
    lease.publish(tokens(1, 4), pages)
    lease.release()
    assert num_cached(cache, tokens(1, 4)) == 0
    assert num_cached(cache, tokens(1, 4), Namespace(salt="a")) == 4
