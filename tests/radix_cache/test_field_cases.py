"""Faults that caches of this kind had in the field."""

from __future__ import annotations

import pytest

from palmette.radix_cache import Namespace, RadixCache, invariants
from tests.radix_cache.helpers import insert, num_cached, run, tokens


def test_every_page_is_counted_in_one_place_after_each_step() -> None:
    cache = RadixCache(num_pages=32, page_size=2)
    other = [1, 2, 3, 4, 5, 6, 50, 51, 52, 53, 54, 55, 56, 57]

    def check_ledger() -> None:
        invariants.check(cache, owned=[])
        num_held = cache.num_cached_pages - cache.num_evictable_pages
        assert cache.pages.num_free + cache.num_evictable_pages + num_held == 32

    for key in (tokens(1, 12), other, tokens(1, 12)):
        insert(cache, key)
        check_ledger()
    assert num_cached(cache, other) == 14
    assert num_cached(cache, [1, 2, 3, 4, 5, 6, 90, 91]) == 6
    check_ledger()
    assert cache.num_evictable_pages * cache.page_size == 20


def test_a_matched_node_is_protected_until_it_is_released() -> None:
    cache = RadixCache(num_pages=32, page_size=1)
    insert(cache, tokens(1, 8))
    lease = cache.match_and_lease(tokens(1, 8))
    insert(cache, [1, 2, 3, 9])
    assert cache.evict(100) == 1
    assert num_cached(cache, tokens(1, 8)) == 8
    lease.release()
    assert cache.evict(100) == 8
    assert num_cached(cache, tokens(1, 8)) == 0
    assert cache.tree.num_holds == 0
    invariants.check(cache, owned=[])


def test_a_salt_cannot_spell_an_adapter(cache: RadixCache) -> None:
    key = tokens(1, 8)
    insert(cache, key, Namespace(adapter="acme"))
    assert num_cached(cache, key, Namespace(salt="acme")) == 0
    assert num_cached(cache, key, Namespace()) == 0
    assert num_cached(cache, key, Namespace(adapter="acme")) == 8
    insert(cache, key, Namespace(salt="a"))
    assert num_cached(cache, key, Namespace(adapter="acme", salt="a")) == 0


def test_other_weights_under_another_identity_share_nothing(cache: RadixCache) -> None:
    insert(cache, tokens(1, 16), Namespace(adapter="tenant:1"))
    assert num_cached(cache, tokens(1, 16), Namespace(adapter="tenant:2")) == 0


def test_weights_replaced_in_place_are_flushed_by_their_namespace(cache: RadixCache) -> None:
    tenant = Namespace(adapter="tenant")
    insert(cache, tokens(1, 16), tenant)
    cache.flush(tenant)
    assert num_cached(cache, tokens(1, 16), tenant) == 0


def test_the_same_text_with_another_picture_shares_nothing() -> None:
    cache = RadixCache(num_pages=64, page_size=1)
    key = [1, 2, 3, 4, 5] + [0] * 16 + [6, 7]
    one, two, resized = (Namespace(media=(name,)) for name in ("h1", "h2", "h1/other size"))
    insert(cache, key, one)
    assert num_cached(cache, key, two) == 0
    insert(cache, key, two)
    assert num_cached(cache, key, one) == 23
    assert num_cached(cache, key, resized) == 0


def test_the_exact_repeat_of_a_prompt_leaves_its_last_token_to_compute(cache: RadixCache) -> None:
    prompt = tokens(1, 8)
    run(cache, prompt, tail=True).release()
    lease = cache.match_and_lease(prompt[:-1])  # the last token is run for its logits
    assert lease.num_tokens == 7
    lease.drop_tail()
    own = cache.allocate(1)
    assert own is not None
    published = lease.publish(prompt, [*lease.page_ids, *own], tail=True)
    assert published.num_folded == 1
    lease.release()
    assert cache.num_cached_pages == 2
    assert cache.match(tokens(1, 9)[:-1]).num_tokens == 8


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_an_aborted_prefill_leaves_only_what_was_computed(num_chunks: int) -> None:
    cache = RadixCache(num_pages=80, page_size=1)
    prompt = tokens(1, 64)
    lease = cache.match_and_lease(prompt[:-1])
    pages = cache.allocate(64)
    assert pages is not None
    for chunk in range(1, num_chunks + 1):
        lease.publish(prompt[: 16 * chunk], pages)
    lease.release()
    cache.pages.free(pages[16 * num_chunks :])
    assert num_cached(cache, prompt) == 16 * num_chunks
    invariants.check(cache, owned=[])


def test_cancelled_sequences_give_back_every_page_and_lock() -> None:
    cache = RadixCache(num_pages=400, page_size=4)
    prefix = tokens(1, 128)
    for round_ in range(15):
        leases = [run(cache, [*prefix, 1000 + n, round_, 7, 7]) for n in range(8)]
        for lease in leases[:2]:
            lease.release()
        retried = [run(cache, [*prefix, 1000 + n, round_, 7, 7]) for n in range(2)]
        unrelated = [run(cache, [2000 + n, round_] * 8) for n in range(4)]
        for lease in leases[2:] + retried + unrelated:
            assert cache.pages.num_free + cache.num_cached_pages == 400
            lease.release()
    assert cache.tree.num_holds == 0
    assert cache.num_available == 400
    invariants.check(cache, owned=[])


def test_a_resumed_sequence_does_not_raise_the_hit_rate() -> None:
    cache = RadixCache(num_pages=64, page_size=4)
    key = tokens(1, 20)
    run(cache, key).release()
    for _ in range(5):  # preempted and resumed
        cache.match_and_lease(key[:-1], counted=False).release()
    assert cache.stats.num_lookup_tokens == 20
    assert cache.stats.hit_rate == 0.0


def test_a_request_larger_than_the_pool_is_told_so_and_the_next_is_served() -> None:
    cache = RadixCache(num_pages=16, page_size=4)
    lease = cache.match_and_lease(tokens(1, 40))
    pages = cache.allocate(10)
    assert pages is not None
    lease.publish(tokens(1, 40), pages)
    assert cache.allocate(50) is None
    lease.release()
    assert cache.allocate(4) is not None


def test_an_answer_that_is_encoded_differently_is_reused_up_to_the_difference(
    cache: RadixCache,
) -> None:
    history = tokens(100, 109)
    run(cache, [*history, 16, 271], tail=True).release()
    match = cache.match([*history, 339, 5, 6])
    assert match.num_tokens == 10
    assert len(match.page_ids) == 2
