from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from palmette.runtime.sampling import TokenCounts


def as_counter(counts: TokenCounts) -> Counter[int]:
    assert len(counts.ids) == len(counts.counts) == len(counts)
    return Counter(dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)))


@hypothesis_settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=200))
def test_counts_agree_with_a_counter_after_any_adds_and_removes(
    steps: list[tuple[bool, int]],
) -> None:
    counts, expected = TokenCounts(), Counter[int]()
    for is_add, token_id in steps:
        if is_add:
            counts.add(token_id)
            expected[token_id] += 1
        elif expected[token_id]:
            counts.remove(token_id)
            expected[token_id] -= 1
        else:
            with pytest.raises(KeyError):
                counts.remove(token_id)
        expected += Counter()  # drops the zeros
        assert as_counter(counts) == expected
        assert counts[token_id] == expected[token_id]


def test_counts_start_from_given_tokens() -> None:
    assert as_counter(TokenCounts([7, 7, 3])) == Counter({7: 2, 3: 1})


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        TokenCounts([-1])
