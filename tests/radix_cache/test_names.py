"""Names of prefixes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import Namespace, RadixCache
from palmette.radix_cache.names import page_name, page_names, root_name
from tests.radix_cache.helpers import insert, tokens

TEXTS = st.text(alphabet="ab\x00\x01", max_size=3)
NAMESPACES = st.builds(
    Namespace, model=TEXTS, adapter=TEXTS, salt=TEXTS, media=st.lists(TEXTS, max_size=2).map(tuple)
)


@settings(deadline=None)
@given(one=NAMESPACES, other=NAMESPACES)
def test_two_namespaces_have_one_name_only_if_they_are_equal(
    one: Namespace, other: Namespace
) -> None:
    assert (root_name(one) == root_name(other)) == (one == other)


def test_no_salt_can_spell_an_adapter() -> None:
    spelt = {
        root_name(Namespace(adapter="a", salt="b")),
        root_name(Namespace(salt="ab")),
        root_name(Namespace(adapter="ab")),
        root_name(Namespace(salt="a", media=("b",))),
        root_name(Namespace(media=("a", "b"))),
        root_name(Namespace(media=("ab",))),
        root_name(Namespace(salt="\ud800")),
    }
    assert len(spelt) == 7
    assert {len(name) for name in spelt} == {16}


def test_a_name_depends_on_every_token_and_on_what_is_before() -> None:
    root = root_name(Namespace())
    names = page_names(root, [1, 2, 3, 4, 5], 2)
    assert names[0] == page_name(root, [1, 2])
    assert names[2] == page_name(page_name(names[0], [3, 4]), [5])
    others = [
        page_names(root, ids, 2)[-1]
        for ids in ([1, 2, 3, 4, 6], [0, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0], [1, 2, 5], [-1, 2, 5])
    ]
    assert len({*names, *others, root}) == 9


def test_names_are_the_same_in_another_process() -> None:
    code = (
        "from palmette.radix_cache import Namespace; "
        "from palmette.radix_cache.names import page_names, root_name; "
        "print(page_names(root_name(Namespace(salt='s')), list(range(40)), 16)[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = page_names(root_name(Namespace(salt="s")), list(range(40)), 16)[-1].hex()
    assert run.stdout.strip() == here


def test_a_token_id_that_has_no_name_is_refused_and_nothing_changes(cache: RadixCache) -> None:
    pages = cache.allocate(2)
    assert pages is not None
    with pytest.raises(ValueError, match="more than 64 bits"):
        cache.insert([1, 2, 3, 4, 1 << 63], pages)
    with pytest.raises(TypeError):
        cache.insert([1, 2, 3, 4.0], pages)  # type: ignore[list-item]
    assert cache.num_cached_pages == 0
    cache.pages.free(pages)


def test_a_key_with_such_a_token_is_matched_and_explained(cache: RadixCache) -> None:
    insert(cache, tokens(1, 8))
    cache.evict(1)
    key = [*tokens(1, 4), 1 << 70]
    assert cache.match(key).num_tokens == 4
    assert cache.explain(key).num_cached_tokens == 4
