"""Pins, log-probabilities, events, statistics and explanations."""

from __future__ import annotations

import logging

import pytest

from palmette.radix_cache import (
    InvariantViolation,
    LeaseReleased,
    Namespace,
    PagesEvicted,
    PagesInserted,
    PinBudgetExceeded,
    PrefixHit,
    RadixCache,
    Reason,
    Removal,
    invariants,
)
from tests.radix_cache.helpers import insert, num_cached, run, tokens


class Recorder:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[PagesInserted | PagesEvicted | PrefixHit] = []

    def inserted(self, event: PagesInserted) -> None:
        self.events.append(event)

    def evicted(self, event: PagesEvicted) -> None:
        self.events.append(event)

    def hit(self, event: PrefixHit) -> None:
        self.events.append(event)


def test_a_pinned_prefix_stays_until_it_is_unpinned(cache: RadixCache) -> None:
    insert(cache, tokens(1, 16))
    pin = cache.pin(cache.match(tokens(1, 6)))
    assert pin.num_tokens == 6
    assert cache.num_pinned_pages == 2
    assert cache.flush() == 2
    assert num_cached(cache, tokens(1, 8)) == 8
    pin.release()
    assert pin.is_released
    assert cache.num_pinned_pages == 0
    assert cache.flush() == 2
    with pytest.raises(LeaseReleased, match="unpin"):
        pin.release()


def test_pins_keep_within_their_budget_and_shared_pages_count_once() -> None:
    cache = RadixCache(num_pages=16, page_size=4, max_pinned_pages=3)
    insert(cache, tokens(1, 12))
    insert(cache, [*tokens(1, 8), 9, 9, 9, 9])
    with cache.pin(cache.match(tokens(1, 8))), cache.pin(cache.match(tokens(1, 12))):
        assert cache.num_pinned_pages == 3
        with pytest.raises(PinBudgetExceeded, match="needs 1 more pages, the pin budget has 0"):
            cache.pin(cache.match([*tokens(1, 8), 9, 9, 9, 9]))
        assert cache.flush() == 1
        invariants.check(cache, owned=[])
    assert cache.num_pinned_pages == 0
    assert cache.flush() == 3


def test_a_pin_survives_splits_of_what_it_holds(cache: RadixCache) -> None:
    insert(cache, tokens(1, 12))
    pin = cache.pin(cache.match(tokens(1, 12)))
    insert(cache, [*tokens(1, 4), 9, 9, 9, 9])
    assert cache.num_pinned_pages == 3
    invariants.check(cache, owned=[])
    assert pin.lease.num_pages == 3
    pin.release()
    assert cache.num_pinned_pages == 0


def test_logprobs_stay_beside_their_pages_through_splits_and_go_with_them(
    cache: RadixCache,
) -> None:
    lease = run(cache, tokens(1, 10), tail=True)
    lease.set_logprobs(1, [-0.1 * n for n in range(1, 10)])
    expected = [None, *(-0.1 * n for n in range(1, 10))]
    assert lease.logprobs() == expected
    lease.release()
    insert(cache, [*tokens(1, 4), 9, 9, 9, 9])
    assert cache.logprobs(cache.match(tokens(1, 10))) == expected
    assert cache.logprobs(cache.match([*tokens(1, 6), 77])) == expected[:6]
    assert cache.logprobs(cache.match([*tokens(1, 4), 9, 9])) == [*expected[:4], None, None]
    cache.flush()
    assert cache.pages_with_logprobs() == []
    insert(cache, tokens(1, 10))
    assert cache.logprobs(cache.match(tokens(1, 10))) == [None] * 10


def test_logprobs_of_a_tail_go_over_to_the_page_that_takes_its_place(cache: RadixCache) -> None:
    first = cache.match_and_lease(tokens(1, 6))
    pages = cache.allocate(2)
    assert pages is not None
    first.publish(tokens(1, 6), pages, tail=True)  # a page of four, and a tail of two
    first.set_logprobs(1, [-0.1 * n for n in range(1, 6)])
    first.release()
    second = cache.match_and_lease(tokens(1, 8))
    own = cache.allocate(1)
    assert own is not None
    second.drop_tail()
    second.publish(tokens(1, 8), [*second.page_ids, *own])
    second.release()
    assert cache.num_cached_pages == 2
    known = cache.logprobs(cache.match(tokens(1, 8)))
    assert known == [None, *(pytest.approx(-0.1 * n) for n in range(1, 6)), None, None]


def test_the_beginning_of_an_evicted_page_is_known_to_be_evicted(cache: RadixCache) -> None:
    run(cache, tokens(1, 11), tail=True).release()  # two pages of four, and a tail of three
    assert cache.evict(2) == 2
    explained = cache.explain([*tokens(1, 10), 99])
    assert [(s.start, s.end, s.reason.value) for s in explained.stretches] == [
        (0, 4, "cached"),
        (4, 10, "evicted"),
        (10, 11, "never seen"),
    ]
    explained = cache.explain([*tokens(1, 6), 99])
    assert [(s.start, s.end) for s in explained.stretches if s.reason.value == "evicted"] == [
        (4, 6)
    ]


def test_logprobs_are_for_tokens_that_are_held(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    with pytest.raises(ValueError, match="tokens 7 to 8, the lease holds 8 tokens"):
        lease.set_logprobs(7, [-1.0, -2.0])
    with pytest.raises(ValueError, match="log-probabilities for tokens -1"):
        lease.set_logprobs(-1, [-1.0])
    lease.set_logprobs(8, [])
    lease.set_logprobs(7, [float("nan")])
    assert lease.logprobs() == [None] * 8


def test_observers_are_told_what_was_inserted_hit_and_evicted() -> None:
    recorder = Recorder()
    cache = RadixCache(num_pages=4, page_size=2, observers=[recorder])
    namespace = Namespace(salt="s")
    insert(cache, [1, 2, 3, 4, 5], namespace)
    cache.match_and_lease([1, 2, 3, 9], namespace).release()
    cache.evict(1, by="request-7")
    assert recorder.events == [
        PagesInserted(
            namespace=namespace,
            num_tokens_before=0,
            parent_page_id=None,
            token_ids=(1, 2, 3, 4),
            page_ids=(0, 1),
        ),
        PagesInserted(
            namespace=namespace,
            num_tokens_before=4,
            parent_page_id=1,
            token_ids=(5,),
            page_ids=(2,),
        ),
        PrefixHit(namespace=namespace, num_tokens=4, num_cached_tokens=3),
        PagesEvicted(
            namespace=namespace,
            num_tokens_before=4,
            token_ids=(5,),
            page_ids=(2,),
            removal=Removal.EVICTED,
            by="request-7",
        ),
    ]
    cache.remove_observer(recorder)
    cache.flush()
    assert len(recorder.events) == 4


def test_an_observer_that_raises_is_told_no_more_and_harms_nobody(
    cache: RadixCache, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorder):
        def inserted(self, event: PagesInserted) -> None:
            raise RuntimeError("broken observer")

    recorder = Recorder()
    cache.add_observer(Broken())
    cache.add_observer(recorder)
    with caplog.at_level(logging.ERROR):
        insert(cache, tokens(1, 8))
        insert(cache, [9] * 4)
    assert caplog.text.count("raised and is told no more") == 1
    assert len(recorder.events) == 2
    invariants.check(cache, owned=[])


def test_an_observer_may_use_the_cache(cache: RadixCache) -> None:
    class Curious(Recorder):
        def inserted(self, event: PagesInserted) -> None:
            super().inserted(event)
            assert cache.match(event.token_ids, event.namespace).page_ids == event.page_ids

        def evicted(self, event: PagesEvicted) -> None:
            super().evicted(event)
            assert cache.match(event.token_ids, event.namespace).num_tokens == 0
            cache.flush()

    curious = Curious()
    cache.add_observer(curious)
    insert(cache, tokens(1, 4))
    insert(cache, tokens(11, 14))
    cache.evict(1)
    assert cache.num_cached_pages == 0
    kinds = [type(event) for event in curious.events]
    assert kinds == [PagesInserted] * 2 + [PagesEvicted] * 2
    invariants.check(cache, owned=[])


def test_the_hit_rate_counts_each_sequence_once(cache: RadixCache) -> None:
    assert cache.stats.hit_rate == 0.0
    insert(cache, tokens(1, 8))
    cache.match(tokens(1, 8))  # looking is not using
    cache.match_and_lease(tokens(1, 16)).release()
    cache.match_and_lease([9] * 4).release()
    cache.match_and_lease(tokens(1, 8), counted=False).release()
    stats = cache.stats
    assert (stats.num_lookup_tokens, stats.num_hit_tokens, stats.num_leases) == (20, 8, 2)
    assert stats.hit_rate == 0.4
    assert stats.num_inserted_pages == 2


def reasons(
    cache: RadixCache, key: list[int], namespace: Namespace | None = None
) -> list[tuple[int, int, Reason]]:
    """The stretches of an explanation, in short."""
    explanation = cache.explain(key, namespace or Namespace())
    return [(s.start, s.end, s.reason) for s in explanation.stretches]


def test_an_explanation_names_the_reason_for_each_token(cache: RadixCache) -> None:
    assert reasons(cache, []) == []
    assert reasons(cache, tokens(1, 8)) == [(0, 8, Reason.NEVER_SEEN)]
    insert(cache, tokens(1, 14))
    assert reasons(cache, tokens(1, 14)) == [(0, 14, Reason.CACHED)]
    assert reasons(cache, tokens(1, 16)) == [(0, 14, Reason.CACHED), (14, 16, Reason.NEVER_SEEN)]
    assert reasons(cache, [*tokens(1, 6), 9]) == [(0, 6, Reason.CACHED), (6, 7, Reason.DIVERGED)]
    other = Namespace(salt="other")
    assert reasons(cache, tokens(1, 16), other) == [
        (0, 14, Reason.OTHER_NAMESPACE),
        (14, 16, Reason.NEVER_SEEN),
    ]
    cache.evict(3, by="request-9")
    assert reasons(cache, tokens(1, 16)) == [
        (0, 4, Reason.CACHED),
        (4, 14, Reason.EVICTED),
        (14, 16, Reason.NEVER_SEEN),
    ]
    text = str(cache.explain(tokens(1, 16)))
    assert "4 of 16 tokens are cached" in text
    assert "tokens 4 to 13: evicted at" in text
    assert "by request-9" in text
    insert(cache, tokens(1, 8))
    assert reasons(cache, tokens(1, 14)) == [(0, 8, Reason.CACHED), (8, 14, Reason.EVICTED)]


def test_a_divergence_is_told_within_an_edge_and_between_edges_at_a_page_border_too(
    cache: RadixCache,
) -> None:
    insert(cache, tokens(1, 12))
    diverged = [(0, 8, Reason.CACHED), (8, 9, Reason.DIVERGED)]
    assert reasons(cache, [*tokens(1, 8), 99]) == diverged  # within an edge
    insert(cache, [*tokens(1, 8), 50, 51, 52, 53])
    assert reasons(cache, [*tokens(1, 8), 99]) == diverged  # where edges part
    assert reasons(cache, [98, 99]) == [(0, 2, Reason.NEVER_SEEN)]  # shares nothing at all


def test_what_follows_evicted_tokens_was_never_seen_whatever_stands_beside_them(
    cache: RadixCache,
) -> None:
    insert(cache, tokens(1, 8))
    insert(cache, [*tokens(1, 4), 50, 51, 52, 53])
    cache.match([*tokens(1, 4), 50, 51, 52, 53])
    cache.evict(1)
    assert reasons(cache, tokens(1, 9)) == [
        (0, 4, Reason.CACHED),
        (4, 8, Reason.EVICTED),
        (8, 9, Reason.NEVER_SEEN),
    ]


def test_an_evicted_tail_does_not_explain_tokens_that_another_page_has(cache: RadixCache) -> None:
    insert(cache, tokens(1, 5))
    cache.evict(1)
    insert(cache, [*tokens(1, 6), 60, 61])
    assert reasons(cache, [*tokens(1, 6), 99]) == [
        (0, 6, Reason.CACHED),
        (6, 7, Reason.DIVERGED),
    ]


def test_a_tail_that_a_page_took_the_place_of_was_not_evicted(cache: RadixCache) -> None:
    recorder = Recorder()
    cache.add_observer(recorder)
    insert(cache, tokens(1, 6))
    cache.evict(0, by="somebody")
    insert(cache, tokens(1, 8))
    assert len(cache.history) == 0
    (event,) = [e for e in recorder.events if isinstance(e, PagesEvicted)]
    assert (event.removal, event.by, event.token_ids) == (Removal.SUBSUMED, None, (5, 6))


def test_pages_that_came_back_are_not_remembered_as_evicted(cache: RadixCache) -> None:
    insert(cache, tokens(1, 12))
    cache.flush()
    assert len(cache.history) == 3
    insert(cache, tokens(1, 12))
    assert len(cache.history) == 0


def test_a_divergence_within_a_longer_tail_is_told_from_its_end(cache: RadixCache) -> None:
    insert(cache, tokens(1, 3))
    assert cache.explain(tokens(1, 4)).stretches[-1].reason is Reason.NEVER_SEEN
    assert cache.explain([1, 2, 9]).stretches[-1].reason is Reason.DIVERGED
    assert "diverged at token 2" in str(cache.explain([1, 2, 9]))


def test_explaining_touches_nothing(cache: RadixCache) -> None:
    insert(cache, [1] * 4)
    insert(cache, [2] * 4)
    cache.explain([1] * 4)
    cache.evict(1)
    assert num_cached(cache, [1] * 4) == 0
    assert cache.stats.num_matches == 1


def test_only_so_many_evicted_pages_are_remembered() -> None:
    cache = RadixCache(num_pages=8, page_size=1, num_remembered=3)
    insert(cache, tokens(1, 8))
    cache.flush()
    assert len(cache.history) == 3
    forgetful = RadixCache(num_pages=8, page_size=1, num_remembered=0)
    insert(forgetful, [1])
    forgetful.flush()
    assert forgetful.explain([1]).stretches[0].reason is Reason.NEVER_SEEN


def test_the_check_finds_what_is_wrong(cache: RadixCache) -> None:
    lease = run(cache, tokens(1, 8))
    pages = cache.allocate(1)
    invariants.check(cache, owned=pages)
    with pytest.raises(InvariantViolation, match="owned by nobody"):
        invariants.check(cache, owned=[])
    node = lease.node("test")
    node.holds += 1
    with pytest.raises(InvariantViolation, match="holds counted"):
        invariants.check(cache)
    node.holds -= 1
    node.page_ids.append(5)
    with pytest.raises(InvariantViolation, match="by state or by tree, not both"):
        invariants.check(cache)
    node.page_ids.pop()
    cache.tree.num_evictable_pages += 1
    with pytest.raises(InvariantViolation, match="1 evictable pages counted, 0 found"):
        invariants.check(cache)
