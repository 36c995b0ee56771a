"""Which sequences are found to share a prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palmette.runtime.attention.buckets import bucket_sequences
from palmette.runtime.attention.sharing import (
    MIN_PAGES,
    MIN_SEQUENCES,
    SharedPrefix,
    find_shared_prefixes,
)


def test_siblings_of_one_prefix_form_one_group() -> None:
    prefix = list(range(MIN_PAGES))
    tables = [[*prefix, 100 + s] for s in range(MIN_SEQUENCES)]
    found = find_shared_prefixes(tables, [4 * MIN_PAGES + 1] * MIN_SEQUENCES, 4)
    assert found == [SharedPrefix(list(range(MIN_SEQUENCES)), MIN_PAGES)]


def test_too_few_sequences_or_pages_are_not_worth_it() -> None:
    prefix = list(range(MIN_PAGES))
    tables = [[*prefix, 100 + s] for s in range(MIN_SEQUENCES)]
    cached = [4 * MIN_PAGES + 1] * MIN_SEQUENCES
    assert find_shared_prefixes(tables[1:], cached[1:], 4) == []
    shorter = [table[1:] for table in tables]
    assert find_shared_prefixes(shorter, cached, 4) == []


def test_a_page_that_a_row_of_the_batch_writes_is_not_shared() -> None:
    tables = [list(range(MIN_PAGES + 1)) for _ in range(MIN_SEQUENCES)]
    num_cached = [4 * MIN_PAGES] * (MIN_SEQUENCES - 1) + [4 * MIN_PAGES - 1]
    assert find_shared_prefixes(tables, num_cached, 4) == []


def test_where_prefixes_branch_the_cut_that_saves_most_is_taken() -> None:
    trunk = list(range(MIN_PAGES))
    left, right = [*trunk, *range(100, 180)], [*trunk, *range(200, 280)]
    tables = [left] * 4 + [right] * 4
    found = find_shared_prefixes(tables, [4 * len(left) + 1] * 8, 4)
    assert found == [SharedPrefix([0, 1, 2, 3], len(left)), SharedPrefix([4, 5, 6, 7], len(right))]
    # Branches of a page each save less than the trunk read once.
    tables = [[*trunk, 100]] * 4 + [[*trunk, 200]] * 4
    found = find_shared_prefixes(tables, [4 * MIN_PAGES + 5] * 8, 4)
    assert found == [SharedPrefix(list(range(8)), MIN_PAGES)]


def test_a_thousand_nested_prefixes_are_grouped_without_deep_recursion() -> None:
    longest = list(range(1500))
    tables = [longest[: MIN_PAGES + s] for s in range(1200)]
    found = find_shared_prefixes(tables, [4 * len(table) for table in tables], 4)
    members = [s for prefix in found for s in prefix.members]
    assert len(members) == len(set(members)) > 0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 14), st.integers(0, 30)),
        max_size=14,
    )
)
def test_groups_are_disjoint_and_their_pages_are_the_same_and_cached(
    drawn: list[tuple[int, int, int]],
) -> None:
    trunks = [list(range(14)), list(range(6)) + list(range(20, 28)), list(range(40, 54))]
    tables = [trunks[which][:n] + [100 + s] * 9 for s, (which, n, _) in enumerate(drawn)]
    cached = [2 * n + extra for _, n, extra in drawn]
    seen: set[int] = set()
    for prefix in find_shared_prefixes(tables, cached, 2):
        assert len(prefix.members) >= MIN_SEQUENCES
        assert prefix.num_pages >= MIN_PAGES
        assert seen.isdisjoint(prefix.members)
        seen.update(prefix.members)
        heads = {tuple(tables[s][: prefix.num_pages]) for s in prefix.members}
        assert len(heads) == 1
        assert all(cached[s] >= 2 * prefix.num_pages for s in prefix.members)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3000)), min_size=1, max_size=40))
def test_every_sequence_is_in_one_bucket_that_is_large_enough(drawn: list[tuple[int, int]]) -> None:
    counts = [count for count, _ in drawn]
    lengths = [count + more for count, more in drawn]
    found = bucket_sequences(counts, lengths, num_heads=4)
    assert sorted(s for bucket in found for s in bucket.members) == list(range(len(drawn)))
    for bucket in found:
        assert bucket.members == sorted(bucket.members)
        assert bucket.num_queries == max(counts[s] for s in bucket.members)
        assert bucket.length == max(lengths[s] for s in bucket.members)
