"""Random operations against a plain dictionary, the ledger checked after each."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.radix_cache.model import Model


@settings(max_examples=100, deadline=None)
# A held edge that stands in the queue is split, so that its last access lies further back.
@example(seed=3, num_pages=11, page_size=3, num_tokens=2, num_slots=0)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(1, 40),
    page_size=st.integers(1, 5),
    num_tokens=st.integers(1, 3),
    num_slots=st.integers(0, 12),
)
def test_random_operations_agree_with_a_dictionary(
    seed: int, num_pages: int, page_size: int, num_tokens: int, num_slots: int
) -> None:
    model = Model(seed, num_pages, page_size, num_tokens, num_slots)
    for _ in range(80):
        model.step()
    model.wind_down()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_a_hundred_thousand_random_operations_agree_with_a_dictionary(page_size: int) -> None:
    for seed in range(26):
        model = Model(
            seed, num_pages=4 + 3 * seed, page_size=page_size, num_tokens=2, num_slots=seed
        )
        for _ in range(1_000):
            model.step()
        model.wind_down()
