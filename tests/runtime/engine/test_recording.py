"""A recording knows the least that its requests can cost."""

from __future__ import annotations

import time

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed, UnsupportedFeature
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.recording import PrefixTree, Recording
from palmette.runtime.testing import tiny_engine


@pm.function
def go_on(s: pm.State, text: str, num_tokens: int) -> None:
    s += text + pm.gen("more", max_tokens=num_tokens, ignore_eos=True, temperature=0)


def recording(known: int = 0) -> Recording:
    return Recording(AsyncEngine.over(tiny_engine), known=known)


def test_the_optimum_counts_each_edge_once_and_the_last_token_of_a_repeated_prompt() -> None:
    backend = recording()
    for text in ("abcdef", "abcxyz", "abcdef"):
        go_on.run(text=text, num_tokens=3, backend=backend)
    best = backend.optimum()
    assert best.prompt_tokens == 18
    assert best.prefilled_tokens == 6 + 3 + 1
    assert best.computed_tokens == 10 + 3 * 2  # the last token of an output is not fed
    assert best.exact_tokens == 5  # only the repeated one, but for its last token
    assert best.hit_rate == pytest.approx(8 / 18)
    assert best.exact_hit_rate == pytest.approx(5 / 18)
    assert backend.stats().computed_tokens == best.computed_tokens
    assert backend.stats().cached_tokens == 8
    assert backend.longest == 9
    backend.close()


def test_forced_tokens_at_the_end_of_a_text_are_not_fed() -> None:
    @pm.function
    def count(s: pm.State) -> None:
        s += "How many? " + pm.gen("n", regex="about [0-9]{2} or so", max_tokens=32)
        s += " Sure? " + pm.gen("m", regex="(yes|no)!", max_tokens=8)

    backend = recording()
    count.run(backend=backend)
    assert backend.stats().forced_tokens > 0
    assert backend.stats().computed_tokens == backend.num_tokens_to_compute()
    backend.close()


def test_the_first_requests_wait_until_all_that_are_known_were_made() -> None:
    backend = recording(known=3)
    texts = [{"text": text, "num_tokens": 1} for text in ("abc", "abd", "abe")]
    first = go_on.stream(**texts[0], backend=backend)
    second = go_on.stream(**texts[1], backend=backend)
    while len(backend.asked) < 2:
        time.sleep(0.001)
    assert backend.stats().requests_started == 0
    go_on.run(**texts[2], backend=backend)
    assert first["more"] is not None
    assert second["more"] is not None
    go_on.run(**texts[0], backend=backend)  # and later ones do not wait
    assert backend.stats().requests_finished == 4
    backend.close()


def test_a_stop_string_is_refused() -> None:
    backend = recording()
    with pytest.raises(PrimitiveFailed) as caught:
        go_on.run(text="abc", num_tokens=3, stop="x", backend=backend)
    assert isinstance(caught.value.__cause__, UnsupportedFeature)
    backend.close()


def test_a_tree_tells_new_nodes_and_the_longest_sequence_that_was_added() -> None:
    tree = PrefixTree()
    assert [tree.add(t) for t in ([1, 2, 3], [1, 2, 4, 5], [1, 2], [])] == [3, 2, 0, 0]
    assert tree.longest_added([1, 2, 3, 9]) == 3
    assert tree.longest_added([1, 2, 4]) == 2
    assert tree.longest_added([2]) == 0
