"""What would be free if some leases were released, against releasing them."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import RadixCache, num_pages_freed_without, num_unheld_pages


def grown_cache(rng: random.Random, page_size: int) -> tuple[RadixCache, list[list[int]]]:
    """A cache with some prompts that share beginnings."""
    cache = RadixCache(num_pages=400, page_size=page_size)
    prompts: list[list[int]] = [[]]
    for _ in range(rng.randrange(2, 12)):
        before = rng.choice(prompts)
        prompt = before[: rng.randrange(len(before) + 1)]
        prompt += [rng.randrange(3) for _ in range(rng.randrange(1, 4 * page_size))]
        prompts.append(prompt)
        with cache.match_and_lease(prompt) as lease:
            held = lease.num_pages
            pages = cache.allocate(-(-len(prompt) // page_size) - held)
            assert pages is not None
            lease.publish(prompt, [*lease.page_ids, *pages], tail=True)
    return cache, prompts


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 2, 4]))
def test_what_some_leases_hold_alone_is_what_their_release_frees(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    cache, prompts = grown_cache(rng, page_size)
    leases = [cache.match_and_lease(rng.choice(prompts)) for _ in range(rng.randrange(1, 10))]
    chosen = [lease for lease in leases if rng.random() < 0.5]
    promised = num_pages_freed_without(chosen)
    before = cache.num_evictable_pages
    # A page that is evictable only now may be subsumed at once, and is free then.
    num_free = cache.pages.num_free
    for lease in chosen:
        lease.release()
    freed = cache.num_evictable_pages - before + cache.pages.num_free - num_free
    assert promised == freed


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 2, 4]))
def test_a_lease_sees_behind_its_pages_what_a_look_from_the_root_sees(
    seed: int, page_size: int
) -> None:
    rng = random.Random(seed)
    cache, prompts = grown_cache(rng, page_size)
    prompt = rng.choice(prompts)
    lease = cache.match_and_lease(prompt[: rng.randrange(len(prompt) + 1)])
    key = prompt + [rng.randrange(3) for _ in range(rng.randrange(6))]
    seen, expected = lease.peek(key), cache.peek(key)
    assert seen == expected  # the same tokens, pages and tail
    assert num_unheld_pages(seen) == num_unheld_pages(expected)
    other = cache.lease(seen)
    assert other.page_ids == expected.page_ids
    other.release()
    lease.release()


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 2, 4]))
def test_what_nobody_holds_of_a_match_is_what_its_lease_takes(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    cache, prompts = grown_cache(rng, page_size)
    leases = [cache.match_and_lease(rng.choice(prompts)) for _ in range(rng.randrange(4))]
    prompt = rng.choice(prompts)
    match = cache.match(prompt[: rng.randrange(len(prompt) + 1)])
    promised = num_unheld_pages(match)
    before = cache.num_evictable_pages
    lease = cache.lease(match)
    lease.drop_tail()
    assert promised == before - cache.num_evictable_pages
    lease.release()
    for other in leases:
        other.release()
