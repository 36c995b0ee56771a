"""Matching: exact to the token, by namespace, and fast among many children."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import Namespace, RadixCache, Tail, invariants
from tests.radix_cache.helpers import insert, num_cached, tokens


def test_an_empty_cache_matches_nothing(cache: RadixCache) -> None:
    match = cache.match(tokens(1, 10))
    assert (match.num_tokens, match.page_ids, match.tail) == (0, (), None)
    assert not cache.tree.roots


def test_whole_pages_are_shared_as_they_are(cache: RadixCache) -> None:
    published = insert(cache, tokens(1, 8))
    match = cache.match(tokens(1, 8))
    assert (match.num_tokens, match.page_ids, match.tail) == (8, published.page_ids, None)


def test_a_key_that_diverges_within_a_page_matches_to_the_token(cache: RadixCache) -> None:
    first, second, third = insert(cache, tokens(1, 12)).page_ids
    match = cache.match([1, 2, 3, 4, 5, 6, 7, 99])
    assert (match.num_tokens, match.page_ids, match.tail) == (7, (first,), Tail(second, 3))
    match = cache.match([*tokens(1, 11), 99])
    assert (match.num_tokens, match.page_ids, match.tail) == (11, (first, second), Tail(third, 3))
    match = cache.match([1, 99])
    assert (match.num_tokens, match.page_ids, match.tail) == (1, (), Tail(first, 1))


def test_a_key_that_ends_within_a_page_matches_to_its_end(cache: RadixCache) -> None:
    first, second = insert(cache, tokens(1, 8)).page_ids
    match = cache.match(tokens(1, 6))
    assert (match.num_tokens, match.page_ids, match.tail) == (6, (first,), Tail(second, 2))
    match = cache.match(tokens(1, 4))
    assert (match.num_tokens, match.page_ids, match.tail) == (4, (first,), None)


def test_a_partial_tail_in_the_tree_is_matched(cache: RadixCache) -> None:
    published = insert(cache, tokens(1, 7))
    assert published.tail is not None
    for key, num_tokens in [(tokens(1, 7), 3), (tokens(1, 9), 3), ([*tokens(1, 6), 99], 2)]:
        assert cache.match(key).tail == Tail(published.tail.page_id, num_tokens)


def test_the_child_that_shares_most_tokens_gives_the_tail(cache: RadixCache) -> None:
    insert(cache, [1, 2, 9, 9])
    best = insert(cache, [1, 2, 3, 9]).page_ids[0]
    insert(cache, [1, 2, 4, 9])
    insert(cache, [1, 9, 9, 9])
    assert cache.match([1, 2, 3, 5]).tail == Tail(best, 3)
    assert num_cached(cache, [1, 2, 5, 5]) == 2
    assert num_cached(cache, [1, 5, 5, 5]) == 1
    assert num_cached(cache, [5, 5, 5, 5]) == 0


@settings(max_examples=100, deadline=None)
@given(
    pages=st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=20, unique=True),
    key=st.lists(st.integers(0, 2), max_size=4),
)
def test_the_tail_is_the_longest_common_prefix_with_any_child(
    pages: list[tuple[int, int, int]], key: list[int]
) -> None:
    cache = RadixCache(num_pages=21, page_size=3)
    for page in pages:
        insert(cache, page)
    lengths = [
        next((n for n in (3, 2, 1) if tuple(key[:n]) == page[:n] and n <= len(key)), 0)
        for page in pages
    ]
    assert num_cached(cache, key) == max(lengths, default=0)


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
def test_thousands_of_children_are_kept_in_order_through_insertion_and_eviction(
    order: str,
) -> None:
    place = {
        "ascending": lambda n: n,
        "descending": lambda n: 2999 - n,
        "mixed": lambda n: n * 7919 % 3000,
    }[order]
    cache = RadixCache(num_pages=3000, page_size=2)
    for number in range(3000):
        insert(cache, [2 * place(number), 7])
        root = cache.match([]).found.node
        assert root is not None
        assert root.children is not None
        assert root.children.is_sound()
    assert list(root.children.ordered()) == [(2 * n, 7) for n in range(3000)]
    assert [num_cached(cache, [2 * n, 5]) for n in range(0, 3000, 7)] == [1] * 429
    assert [num_cached(cache, [2 * n + 1, 5]) for n in range(0, 3000, 7)] == [0] * 429
    assert cache.evict(2500) == 2500
    invariants.check(cache)
    left = sum(num_cached(cache, [2 * n, 7]) == 2 for n in range(3000))
    assert left == 500


def test_lists_tuples_and_arrays_are_the_same_key(cache: RadixCache) -> None:
    insert(cache, array("q", tokens(1, 10)))
    for key in (tokens(1, 10), tuple(tokens(1, 10)), array("i", tokens(1, 10)), range(1, 11)):
        assert num_cached(cache, key) == 10


def test_tokens_that_are_no_integers_do_not_enter_the_tree(cache: RadixCache) -> None:
    pages = cache.allocate(1)
    assert pages is not None
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            cache.insert([1, 2, 3, wrong], pages)  # type: ignore[list-item]
    cache.pages.free(pages)
    invariants.check(cache, owned=[])


def test_every_field_of_a_namespace_keeps_prefixes_apart(cache: RadixCache) -> None:
    namespaces = [
        Namespace(),
        Namespace(model="x"),
        Namespace(adapter="x"),
        Namespace(salt="x"),
        Namespace(media=("x",)),
        Namespace(media=("x", "")),
        Namespace(model="x", adapter="x"),
    ]
    for namespace in namespaces:
        assert num_cached(cache, tokens(1, 4), namespace) == 0
        insert(cache, tokens(1, 4), namespace)
    pages = {cache.match(tokens(1, 4), namespace).page_ids for namespace in namespaces}
    assert len(pages) == len(namespaces)


def test_a_namespace_takes_strings_only() -> None:
    with pytest.raises(TypeError, match="salt must be a string, got 7"):
        Namespace(salt=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="media must be a tuple of strings"):
        Namespace(media=["x"])  # type: ignore[arg-type]


def test_namespaces_that_hold_nothing_are_forgotten(cache: RadixCache) -> None:
    for salt in range(100):
        namespace = Namespace(salt=str(salt))
        cache.match(tokens(1, 8), namespace)
        cache.match_and_lease(tokens(1, 8), namespace).release()
        insert(cache, tokens(1, 8), namespace)
        cache.explain(tokens(1, 8), namespace)
        cache.flush()
    assert not cache.tree.roots


def test_a_page_of_one_token_needs_no_tails() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    insert(cache, [1, 2, 3])
    match = cache.match([1, 2, 4])
    assert (match.num_tokens, match.tail) == (2, None)


def test_a_tree_of_many_levels_is_walked_checked_and_flushed_without_recursion() -> None:
    num_levels = 5_000
    cache = RadixCache(num_pages=num_levels, page_size=1)
    spine = tokens(1, num_levels)
    pages = cache.allocate(num_levels)
    assert pages is not None
    lease = cache.match_and_lease([])
    copies = []
    for level in range(1, num_levels + 1):
        lease.publish(spine[:level], pages[:level])
        copies.append(lease.copy())  # so that the next page does not lengthen the same edge
    lease.release()
    assert cache.tree.num_nodes == num_levels
    assert num_cached(cache, [*spine, 0]) == num_levels
    assert cache.explain(spine).num_cached_tokens == num_levels
    invariants.check(cache, owned=[])
    for copy in copies:
        copy.release()
    pin = cache.pin(cache.match(spine[: num_levels // 2]))
    invariants.check(cache, owned=[])
    assert cache.flush() == num_levels // 2
    pin.release()
    assert cache.flush(Namespace()) == num_levels // 2
    invariants.check(cache, owned=[])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"num_pages": 4, "page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_pages": 4, "max_pinned_pages": 5}, "max_pinned_pages must be between 0 and 4"),
        ({"num_pages": 4, "num_remembered": -1}, "evicted pages to remember is negative: -1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RadixCache(**arguments)
