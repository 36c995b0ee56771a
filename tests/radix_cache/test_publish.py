"""Publication: pages move to the tree once, duplicates fold, tails are kept where useful."""

from __future__ import annotations

import pytest

from palmette.radix_cache import (
    LeaseReleased,
    PageNotOwned,
    PageState,
    RadixCache,
    Tail,
    invariants,
)
from tests.radix_cache.helpers import insert, num_cached, run, tokens


def allocate(cache: RadixCache, num_pages: int) -> list[int]:
    pages = cache.allocate(num_pages)
    assert pages is not None
    return pages


def test_whole_pages_move_to_the_tree_while_the_sequence_runs(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    pages = allocate(cache, 3)
    assert lease.publish(tokens(1, 3), pages).page_ids == ()
    assert lease.publish(tokens(1, 6), pages).page_ids == tuple(pages[:1])
    assert lease.publish(tokens(1, 8), pages).page_ids == tuple(pages[:2])
    assert lease.publish(tokens(1, 11), pages).page_ids == tuple(pages[:2])
    assert num_cached(cache, tokens(1, 11)) == 8
    assert cache.pages.state(pages[1]) is PageState.CACHED
    assert cache.pages.state(pages[2]) is PageState.OWNED
    assert cache.evict(100) == 0
    invariants.check(cache, owned=[pages[2]])


def test_a_sequence_that_runs_alone_leaves_one_edge(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    pages = allocate(cache, 8)
    for num_tokens in range(1, 33):
        lease.publish(tokens(1, num_tokens), pages)
    assert cache.tree.num_nodes == 1
    assert lease.page_ids == tuple(pages)


def test_two_sequences_that_computed_the_same_end_up_on_one_copy(cache: RadixCache) -> None:
    one, other = cache.match_and_lease([]), cache.match_and_lease([])
    first, second = allocate(cache, 3), allocate(cache, 3)
    assert one.publish(tokens(1, 9), first).page_ids == tuple(first[:2])
    published = other.publish([*tokens(1, 8), 99], second)
    assert published.page_ids == tuple(first[:2])
    assert published.num_folded == 2
    assert cache.pages.state(second[0]) is PageState.FREE
    assert cache.pages.state(second[2]) is PageState.OWNED
    table = [*published.page_ids, second[2]]
    one.release()
    assert cache.evict(100) == 0  # the other sequence holds them now
    other.publish([*tokens(1, 8), 99], table, tail=True)
    invariants.check(cache, owned=[first[2]])


def test_folding_stops_where_the_sequences_part(cache: RadixCache) -> None:
    run(cache, tokens(1, 16)).release()
    lease = cache.match_and_lease([])
    pages = allocate(cache, 3)
    published = lease.publish([*tokens(1, 8), 9, 9, 9, 9], pages)
    assert published.num_folded == 2
    assert published.page_ids[2] == pages[2]
    assert cache.evict(100) == 2
    assert num_cached(cache, [*tokens(1, 8), 9, 9, 9, 9]) == 12
    invariants.check(cache, owned=[])


def test_a_block_table_that_was_not_taken_over_is_refused(cache: RadixCache) -> None:
    run(cache, tokens(1, 4)).release()
    lease = cache.match_and_lease([])
    pages = allocate(cache, 2)
    lease.publish(tokens(1, 4), pages)
    with pytest.raises(ValueError, match=r"take over Published\.page_ids"):
        lease.publish(tokens(1, 8), pages)
    invariants.check(cache, owned=pages[1:])


def test_a_finished_sequence_leaves_its_partial_page_too(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    pages = allocate(cache, 4)
    published = lease.publish(tokens(1, 7), pages, tail=True)
    assert published.page_ids == (pages[0],)
    assert published.tail == lease.tail == Tail(pages[1], 3)
    invariants.check(cache, owned=[])  # pages beyond the tokens are free as well
    assert cache.pages.num_free == 14
    lease.release()
    assert num_cached(cache, tokens(1, 9)) == 7


@pytest.mark.parametrize("other", [tokens(1, 8), tokens(1, 7), tokens(1, 12)])
def test_a_tail_whose_tokens_the_tree_has_is_freed(cache: RadixCache, other: list[int]) -> None:
    insert(cache, other)
    num_pages = cache.num_cached_pages
    lease = cache.match_and_lease([])
    published = lease.publish(tokens(1, 6), allocate(cache, 2), tail=True)
    assert (published.tail, published.num_folded) == (None, 1)
    assert cache.num_cached_pages == num_pages
    invariants.check(cache, owned=[])


def test_a_longer_tail_or_page_takes_the_place_of_a_shorter_tail(cache: RadixCache) -> None:
    insert(cache, tokens(1, 5))
    insert(cache, [1, 2, 3, 4, 9])
    insert(cache, tokens(1, 7))
    assert cache.num_cached_pages == 3
    insert(cache, tokens(1, 8))
    assert cache.num_cached_pages == 3
    assert cache.stats.num_subsumed_pages == 2
    assert num_cached(cache, [1, 2, 3, 4, 9]) == 5


def test_a_leased_tail_goes_when_its_lease_does_if_a_page_subsumes_it(cache: RadixCache) -> None:
    insert(cache, tokens(1, 6))
    lease = cache.match_and_lease(tokens(1, 6))
    insert(cache, tokens(1, 8))
    assert cache.num_cached_pages == 3
    lease.drop_tail()
    assert cache.num_cached_pages == 2
    lease.release()
    invariants.check(cache, owned=[])


def test_a_subsumed_tail_stays_if_the_page_that_subsumed_it_went_first(cache: RadixCache) -> None:
    insert(cache, tokens(1, 6))
    lease = cache.match_and_lease(tokens(1, 6))
    insert(cache, tokens(1, 8))
    assert cache.evict(1) == 1
    lease.release()
    assert num_cached(cache, tokens(1, 8)) == 6


def test_the_tail_copied_from_is_dropped_with_the_first_page_in_its_place(
    cache: RadixCache,
) -> None:
    insert(cache, tokens(1, 8))
    lease = cache.match_and_lease([1, 2, 3, 4, 5, 9])
    own = allocate(cache, 1)
    assert lease.tail is not None
    published = lease.publish([1, 2, 3, 4, 5, 9, 9, 9], [*lease.page_ids, *own])
    assert published.page_ids == (*lease.page_ids[:1], *own)
    assert lease.tail is None
    assert cache.evict(100) == 1


def test_publishing_needs_as_many_pages_as_the_tokens_fill(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    pages = allocate(cache, 1)
    with pytest.raises(ValueError, match="8 tokens need 2 pages, got 1"):
        lease.publish(tokens(1, 8), pages)
    with pytest.raises(ValueError, match="5 tokens need 2 pages, got 1"):
        lease.publish(tokens(1, 5), pages, tail=True)
    lease.publish(tokens(1, 5), pages)
    with pytest.raises(ValueError, match="3 tokens given, the lease holds 1 pages"):
        lease.publish(tokens(1, 3), pages)


@pytest.mark.parametrize("tail", [False, True])
def test_a_page_that_is_not_owned_is_refused_and_nothing_changes(
    cache: RadixCache, tail: bool
) -> None:
    insert(cache, [9, 9, 9, 9])
    theirs = cache.match([9, 9, 9, 9]).page_ids[0]
    own = allocate(cache, 3)
    cache.pages.free(own[2:])
    lease = cache.match_and_lease([])
    for second, why in [
        (theirs, "in the tree"),
        (own[2], "free"),
        (own[0], "named twice"),
        (99, "not one of the pool's 16"),
    ]:
        with pytest.raises(PageNotOwned, match=f"page {second} is {why}"):
            lease.publish(tokens(1, 8), [own[0], second], tail=tail)
        assert lease.num_pages == 0
        invariants.check(cache, owned=own[:2])


def test_a_duplicate_that_is_not_owned_is_refused_too(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    own = allocate(cache, 2)
    lease = cache.match_and_lease([])
    for wrong in (
        [own[0], own[0]],
        [15, own[1]],
        list(reversed(cache.match(tokens(1, 8)).page_ids)),
    ):
        with pytest.raises(PageNotOwned):
            lease.publish(tokens(1, 8), wrong)
        invariants.check(cache, owned=own)
    assert lease.publish(tokens(1, 8), own).num_folded == 2


def test_inserting_takes_pages_of_a_matched_prefix_in_their_place(cache: RadixCache) -> None:
    first = insert(cache, tokens(1, 8)).page_ids
    own = allocate(cache, 1)
    published = cache.insert(tokens(1, 12), [*first, *own])
    assert published.page_ids == (*first, *own)
    assert published.num_folded == 0
    with pytest.raises(PageNotOwned, match="in the tree"):
        cache.insert([7, 7, 7, 7], [first[0]])


def test_a_lease_goes_on_publishing_after_others_split_and_branched(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    insert(cache, [1, 2, 3, 4, 9, 9, 9, 9])
    insert(cache, [*tokens(1, 8), 7, 7, 7, 7])
    own = allocate(cache, 1)
    lease.publish(tokens(1, 12), [*lease.page_ids, *own])
    assert num_cached(cache, tokens(1, 12)) == 12
    assert cache.evict(100) == 2
    invariants.check(cache, owned=[])


def test_appending_gives_what_is_new_and_folds_as_publishing_does(cache: RadixCache) -> None:
    run(cache, tokens(1, 8), tail=False).release()
    lease = cache.match_and_lease(tokens(1, 4))
    pages = allocate(cache, 2)
    held = lease.append(tokens(5, 12), pages)
    assert held == lease.page_ids[1:]
    assert held[0] != pages[0]  # the tree had that one
    assert held[1] == pages[1]
    assert cache.pages.state(pages[0]) is PageState.FREE
    assert num_cached(cache, tokens(1, 12)) == 12
    invariants.check(cache, owned=[])


def test_appending_takes_whole_pages_that_the_caller_owns(cache: RadixCache) -> None:
    lease = cache.match_and_lease([])
    (page,) = allocate(cache, 1)
    with pytest.raises(ValueError, match="3 tokens given for 1 pages of 4"):
        lease.append(tokens(1, 3), [page])
    with pytest.raises(PageNotOwned):
        lease.append(tokens(1, 4), [page + 1])
    assert lease.append([], []) == ()
    assert lease.num_pages == 0
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.append(tokens(1, 4), [page])
    invariants.check(cache, owned=[page])
