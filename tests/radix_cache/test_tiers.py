"""A second place for evicted pages."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import (
    InvariantViolation,
    LeaseReleased,
    Namespace,
    Promise,
    RadixCache,
    Reason,
    StaleMatch,
    Tier,
    invariants,
)
from tests.radix_cache.helpers import insert, run, tokens


class Store:
    """Writes down what is to be copied where."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def __call__(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.calls.append((list(page_ids), list(slots)))


def make(num_pages: int = 8, num_slots: int = 8) -> tuple[RadixCache, Tier, Store]:
    store = Store()
    tier = Tier(num_slots, store)
    return RadixCache(num_pages, page_size=4, tier=tier), tier, store


def promise_of(cache: RadixCache, token_ids: list[int]) -> Promise:
    with cache.match_and_lease(token_ids) as lease:
        return lease.promise(token_ids)


def num_in_tier(cache: RadixCache, token_ids: list[int], namespace: Namespace | None = None) -> int:
    return cache.num_tier_pages(cache.match(token_ids, namespace or Namespace()))


def test_evicted_pages_go_to_the_tier_and_can_come_back() -> None:
    cache, tier, store = make()
    published = insert(cache, tokens(1, 16))
    cache.evict(2)
    ((page_ids, slots),) = store.calls
    assert sorted(page_ids) == sorted(published.page_ids[2:])
    match = cache.match(tokens(1, 16))
    assert (match.num_tokens, cache.num_tier_pages(match)) == (8, 2)
    promise = promise_of(cache, tokens(1, 16))
    assert dict(zip(slots, page_ids, strict=True))[promise.slots[0]] == published.page_ids[2]
    assert dict(zip(slots, page_ids, strict=True))[promise.slots[1]] == published.page_ids[3]
    promise.fulfil()
    assert tier.stats.num_restored_pages == 2
    invariants.check(cache)


def test_pages_are_copied_before_anybody_else_gets_them() -> None:
    owned: list[list[int]] = []
    tier = Tier(4, lambda page_ids, slots: owned.append(cache.pages.owned()))
    cache = RadixCache(2, page_size=4, tier=tier)
    insert(cache, tokens(1, 8))
    assert cache.allocate(2) == [0, 1]
    assert owned == [[]]


def test_a_partial_tail_does_not_go_to_the_tier() -> None:
    cache, _, store = make()
    insert(cache, tokens(1, 6))
    assert cache.evict(8) == 2
    assert [len(page_ids) for page_ids, _ in store.calls] == [1]
    assert num_in_tier(cache, tokens(1, 6)) == 1


def test_a_key_that_ends_within_a_page_gets_whole_pages_only() -> None:
    cache, _, _ = make()
    insert(cache, tokens(1, 16))
    cache.evict(8)
    assert [num_in_tier(cache, tokens(1, last)) for last in (3, 4, 11, 12, 15)] == [0, 1, 2, 3, 3]
    assert num_in_tier(cache, [9, *tokens(2, 16)]) == 0


def test_what_is_behind_the_trees_tail_is_in_the_tiers_first_page() -> None:
    cache, _, _ = make()
    insert(cache, tokens(1, 8))
    cache.evict(8)
    run(cache, [1, 2, 3, 4, 5, 6, 99, 99]).release()
    match = cache.match(tokens(1, 8))
    assert (len(match.page_ids), match.num_tokens) == (1, 6)
    assert cache.num_tier_pages(match) == 1


def test_a_page_that_came_back_is_not_copied_a_second_time() -> None:
    cache, tier, store = make()
    insert(cache, tokens(1, 16))
    cache.evict(8)
    insert(cache, tokens(1, 16))
    cache.evict(8)
    assert len(store.calls) == 1
    assert (tier.stats.num_stored_pages, tier.stats.num_kept_pages) == (4, 4)
    assert num_in_tier(cache, tokens(1, 16)) == 4


def test_the_end_of_a_prefix_makes_room_before_its_beginning() -> None:
    cache, tier, _ = make(num_slots=3)
    insert(cache, tokens(1, 20))
    cache.evict(8)
    assert num_in_tier(cache, tokens(1, 20)) == 3
    insert(cache, [99] * 4)
    cache.evict(8)
    assert num_in_tier(cache, tokens(1, 20)) == 2
    assert tier.stats.num_dropped_pages == 3
    invariants.check(cache)


def test_a_slot_that_is_promised_is_not_used_for_others() -> None:
    cache, tier, store = make(num_slots=2)
    insert(cache, tokens(1, 8))
    cache.evict(8)
    promise = promise_of(cache, tokens(1, 8))
    insert(cache, tokens(50, 61))
    cache.evict(8)
    assert len(store.calls) == 1
    assert tier.stats.num_refused_pages == 3
    invariants.check(cache)
    promise.cancel()
    assert tier.stats.num_restored_pages == 0
    insert(cache, tokens(50, 57))
    cache.evict(8)
    assert num_in_tier(cache, tokens(50, 57)) == 2
    with pytest.raises(LeaseReleased):
        promise.fulfil()


def test_a_page_promised_twice_is_kept_until_both_are_settled() -> None:
    cache, _, _ = make(num_slots=1)
    insert(cache, tokens(1, 4))
    cache.evict(8)
    first, second = (promise_of(cache, tokens(1, 4)) for _ in range(2))
    first.fulfil()
    insert(cache, tokens(5, 8))
    cache.evict(8)
    assert num_in_tier(cache, tokens(5, 8)) == 0
    second.fulfil()
    insert(cache, tokens(5, 8))
    cache.evict(8)
    assert num_in_tier(cache, tokens(5, 8)) == 1
    assert num_in_tier(cache, tokens(1, 4)) == 0


def test_a_promise_counts_as_a_use() -> None:
    cache, _, _ = make(num_slots=2)
    for first in (10, 20):
        insert(cache, [first] * 4)
        cache.evict(8)
    assert num_in_tier(cache, [10] * 4) == 1  # asking does not
    promise_of(cache, [10] * 4).fulfil()
    insert(cache, [30] * 4)
    cache.evict(8)
    assert [num_in_tier(cache, [first] * 4) for first in (10, 20, 30)] == [1, 0, 1]


@pytest.mark.parametrize("namespace", [Namespace(salt="a"), None])
def test_a_flush_drops_what_the_tier_holds(namespace: Namespace | None) -> None:
    cache, tier, _ = make()
    for salt in ("a", "b"):
        insert(cache, tokens(1, 8), Namespace(salt=salt))
    cache.evict(8)
    cache.flush(namespace, by="operator")
    assert num_in_tier(cache, tokens(1, 8), Namespace(salt="a")) == 0
    assert num_in_tier(cache, tokens(1, 8), Namespace(salt="b")) == (2 if namespace else 0)
    assert tier.stats.num_flushed_pages == (2 if namespace else 4)
    assert "flushed by operator" in str(cache.explain(tokens(1, 8), Namespace(salt="a")))
    invariants.check(cache)


def test_pages_that_are_flushed_from_the_tree_do_not_go_to_the_tier() -> None:
    cache, tier, store = make()
    insert(cache, tokens(1, 8))
    cache.flush()
    assert store.calls == []
    assert tier.num_pages == 0


def test_a_promised_slot_outlives_a_flush_but_is_found_no_more() -> None:
    cache, tier, store = make(num_slots=1)
    insert(cache, tokens(1, 4))
    cache.evict(8)
    promise = promise_of(cache, tokens(1, 4))
    cache.flush()
    assert num_in_tier(cache, tokens(1, 4)) == 0
    insert(cache, tokens(1, 4))
    cache.evict(8)
    assert len(store.calls) == 1
    invariants.check(cache)
    promise.fulfil()
    assert tier.free_slots() == [0]
    invariants.check(cache)


def test_other_namespaces_see_nothing_of_it() -> None:
    cache, _, _ = make()
    insert(cache, tokens(1, 8), Namespace(salt="a"))
    cache.evict(8)
    assert num_in_tier(cache, tokens(1, 8), Namespace(salt="b")) == 0
    assert num_in_tier(cache, tokens(1, 8), Namespace(adapter="a")) == 0


def test_tokens_in_the_tier_are_explained_as_such() -> None:
    cache, _, _ = make(num_slots=2)
    insert(cache, tokens(1, 16))
    cache.evict(3)
    found = [(s.start, s.end, s.reason) for s in cache.explain(tokens(1, 18)).stretches]
    assert found == [
        (0, 4, Reason.CACHED),
        (4, 12, Reason.IN_TIER),
        (12, 16, Reason.EVICTED),  # had to make room in the tier as well
        (16, 18, Reason.NEVER_SEEN),
    ]
    assert "tokens 4 to 11: in the tier\n" in str(cache.explain(tokens(1, 18)))


def test_without_a_tier_nothing_is_promised(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    cache.evict(8)
    match = cache.match(tokens(1, 8))
    assert cache.num_tier_pages(match) == 0
    promise = promise_of(cache, tokens(1, 8))
    assert promise.slots == ()
    promise.fulfil()


def test_a_stale_match_tells_nothing_of_the_tier() -> None:
    cache, _, _ = make()
    insert(cache, tokens(1, 12))
    match = cache.match(tokens(1, 12))
    cache.evict(1)
    with pytest.raises(StaleMatch):
        cache.num_tier_pages(match)


def test_a_released_lease_or_too_few_tokens_promise_nothing(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    with pytest.raises(ValueError, match="7 tokens given, the lease holds 2 pages"):
        lease.promise(tokens(1, 7))
    lease.release()
    with pytest.raises(LeaseReleased):
        lease.promise(tokens(1, 8))


class Failing(Store):
    """Raises `error` once, having copied the first page; then it is a store as any other."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def __call__(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            super().__call__(page_ids[:1], slots[:1])
            raise error
        super().__call__(page_ids, slots)


def test_a_store_that_fails_costs_pages_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Failing(OSError("no room"))
    tier = Tier(4, store)
    cache = RadixCache(8, page_size=4, tier=tier)
    insert(cache, tokens(1, 12))
    with caplog.at_level(logging.ERROR):
        assert cache.evict(2) == 2  # in one call: the first is copied, the other is not
    assert "could not be copied" in caplog.text
    assert (tier.num_pages, tier.stats.num_dropped_pages) == (0, 2)
    assert cache.evict(1) == 1
    assert len(store.calls) == 1  # nothing more is taken
    assert num_in_tier(cache, tokens(1, 12)) == 0
    assert "evicted" in str(cache.explain(tokens(1, 12)))
    invariants.check(cache)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit()])
def test_what_an_interrupt_kept_from_being_copied_is_not_in_the_tier(
    interrupt: BaseException,
) -> None:
    store = Failing(interrupt)
    tier = Tier(4, store)
    cache = RadixCache(4, page_size=4, tier=tier)
    insert(cache, tokens(50, 53))
    insert(cache, tokens(1, 12))
    with pytest.raises(type(interrupt)):
        cache.allocate(3)
    assert (tier.num_pages, tier.stats.num_dropped_pages) == (0, 3)
    assert promise_of(cache, tokens(50, 53)).num_pages == 0
    invariants.check(cache)
    cache.evict(1)
    assert len(store.calls) == 2  # the tier goes on
    assert tier.num_pages == 1
    invariants.check(cache)


def test_an_eviction_that_was_interrupted_leaves_nothing_to_be_copied_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By then, others may have written the pages."""
    cache, tier, store = make()
    insert(cache, tokens(1, 8))
    take = tier.take

    def interrupted(*args: Any) -> None:
        take(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(tier, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.evict(1)
    monkeypatch.undo()
    assert not tier.has_moves
    assert tier.num_pages == 0
    assert store.calls == []


def test_a_tier_has_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        Tier(0, Store())


def test_the_check_notices_a_slot_that_was_lost() -> None:
    cache, tier, _ = make()
    insert(cache, tokens(1, 8))
    cache.evict(8)
    invariants.check(cache)
    tier._free.pop()
    with pytest.raises(InvariantViolation, match="a slot was lost"):
        invariants.check(cache)


NAMES = [bytes([n]) for n in range(6)]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.lists(st.sampled_from(NAMES), unique=True, max_size=4)),
        st.tuples(st.just("promise"), st.lists(st.sampled_from(NAMES), unique=True, max_size=3)),
        st.tuples(st.just("settle"), st.integers(0, 3)),
        st.tuples(st.just("flush"), st.sampled_from(["a", "b", None])),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(num_slots=st.integers(1, 4), acts=ACTS)
def test_a_tier_keeps_what_a_dictionary_in_order_of_use_keeps(
    num_slots: int, acts: list[tuple[str, object]]
) -> None:
    contents: dict[int, int] = {}  # slot -> page

    def store(page_ids: Sequence[int], slots: Sequence[int]) -> None:
        contents.update(zip(slots, page_ids, strict=True))

    tier = Tier(num_slots, store)
    kept: OrderedDict[bytes, int] = OrderedDict()  # name -> page, the oldest first
    promises: list[tuple[list[bytes], list[int]]] = []
    made = []
    next_page = 0
    for act, given_ in acts:
        if act == "take":
            assert isinstance(given_, list)
            pages = list(range(next_page, next_page + len(given_)))
            next_page += len(given_)
            for name, page in zip(reversed(given_), reversed(pages), strict=True):
                promised = {n for names, _ in promises for n in names}
                if name in kept:
                    kept.move_to_end(name)
                    continue
                idle = [n for n in kept if n not in promised]
                if len(kept) == num_slots:
                    if not idle:
                        continue
                    del kept[idle[0]]
                kept[name] = page
            tier.take(Namespace(salt="a"), given_, pages)
            tier.carry_out()
        elif act == "promise":
            assert isinstance(given_, list)
            assert [name in tier for name in given_] == [name in kept for name in given_]
            names = list(itertools.takewhile(kept.__contains__, given_))
            promises.append((names, [kept[name] for name in names]))
            made.append(tier.promise(names))
        elif act == "settle" and promises:
            assert isinstance(given_, int)
            place = given_ % len(promises)
            names, pages = promises.pop(place)
            promise = made.pop(place)
            assert [contents[slot] for slot in promise.slots] == pages
            promise.fulfil()
            for name in reversed(names):
                if name in kept and not any(name in others for others, _ in promises):
                    kept.move_to_end(name)
        elif act == "flush" and not promises:
            tier.flush(None if given_ is None else Namespace(salt=str(given_)))
            if given_ != "b":
                kept.clear()
        assert {name for name in NAMES if name in tier} == set(kept)
        promised = {n for names, _ in promises for n in names}
        idle_pages = [page for name, page in kept.items() if name not in promised]
        assert [contents[slot] for slot in tier.idle_slots()] == idle_pages
