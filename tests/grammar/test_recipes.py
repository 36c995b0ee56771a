from __future__ import annotations

from collections.abc import Callable

import pytest

from palmette.grammar import GrammarTooComplex, Limits
from palmette.grammar.recipes import Recipes
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import ALL_BYTES, Rule, Term, bits_of

STORES: list[Callable[..., TermStore]] = [TermStore]
try:
    from palmette.grammar import _native
except ImportError:
    pass
else:
    STORES.append(_native.TermStore)

TEXTS = [b"", b"a", b"b", b"ab", b"abab", b"aab", b"xyz", b"xy", b"ca", b"cca", b"c", b"cxyz"]


def everything(store: TermStore) -> Term:
    """A term of every regular kind."""
    a, b, c = (store.byte_set(bits_of(each)) for each in (b"a", b"b", b"c"))
    words = store.words([b"xyz", b"xy", b"ab"])
    table = store.table([False, True], [[(bits_of(b"c"), 0), (bits_of(b"a"), 1)], []])
    loop = store.repeat(store.mark_character(store.alternation([a, b])), 0, 3)
    odd = store.both(loop, store.complement(store.literal(b"aab")))
    return store.lexeme(store.alternation([odd, table, words, store.sequence(c, words)]))


@pytest.fixture(params=STORES, ids=["python", "native"][: len(STORES)])
def make(request: pytest.FixtureRequest) -> Callable[..., TermStore]:
    return request.param  # type: ignore[no-any-return]


def test_a_term_made_after_a_recipe_is_that_made_by_hand(
    make: Callable[..., TermStore],
) -> None:
    kitchen, store = make(Limits()), make(Limits())
    recipe = kitchen.recipe(everything(kitchen))
    assert recipe is not None
    made = store.follow(recipe)
    for text in TEXTS:
        assert store.accepts(made, text) == kitchen.accepts(everything(kitchen), text)
    assert store.accepts(made, b"cca")
    assert not store.accepts(made, b"aab")


def test_what_is_known_of_a_term_comes_along(make: Callable[..., TermStore]) -> None:
    kitchen, store = make(Limits()), make(Limits())
    term = everything(kitchen)
    nothing = kitchen.both(term, kitchen.literal(b"aab"))
    assert kitchen.is_empty(nothing)
    assert kitchen.min_bytes(term) == 0
    for each, num_bytes in ((term, 0), (nothing, None)):
        recipe = kitchen.recipe(each)
        assert recipe is not None
        made = store.follow(recipe)
        assert store.is_empty(made) == (num_bytes is None)
        if num_bytes is not None:
            assert store.min_bytes(made) == num_bytes


def test_what_is_not_regular_has_no_recipe(make: Callable[..., TermStore]) -> None:
    store = make(Limits())
    rule = Rule("r", lambda: store.literal(b"a"), shortest=lambda: store.literal(b"a"), min_bytes=1)
    assert store.recipe(store.sequence(store.literal(b"b"), store.call(rule))) is None


def test_a_term_is_worked_out_once_for_all_stores_of_one_alphabet(
    make: Callable[..., TermStore],
) -> None:
    recipes = Recipes()
    asked: list[TermStore] = []

    def term(store: TermStore) -> Term:
        asked.append(store)
        return everything(store)

    stores = [make(Limits()), make(Limits()), make(Limits(), ALL_BYTES ^ bits_of(b"y"))]
    made = [recipes.term(store, "everything", term) for store in stores]
    assert len(asked) == 2
    assert not any(each is store for each in asked for store in stores)
    assert [s.accepts(t, b"xyz") for s, t in zip(stores, made, strict=True)] == [True, True, False]


def test_the_recipes_that_were_asked_for_last_are_kept() -> None:
    recipes = Recipes(max_steps=64)
    store = TermStore(Limits())
    asked: list[int] = []

    def word(number: int) -> Term:
        def make(kitchen: TermStore) -> Term:
            asked.append(number)
            return kitchen.sequence(kitchen.byte_set(number + 1), kitchen.byte_set(1))

        return recipes.term(store, number, make)

    for number in range(40):
        word(number)
        word(0)
    assert asked == list(range(40))
    assert len(recipes) <= 32
    word(1)
    assert asked[-1] == 1


def test_nothing_is_kept_of_what_cannot_be_made() -> None:
    recipes = Recipes()

    def make(store: TermStore) -> Term:
        words = [store.sequence(store.byte_set(1 << n), store.byte_set(2 << n)) for n in range(9)]
        return store.alternation(words)

    with pytest.raises(GrammarTooComplex, match="more than 8 alternatives"):
        recipes.term(TermStore(Limits(max_alternatives=8)), "words", make)
    assert len(recipes) == 0
    recipes.term(TermStore(Limits(max_alternatives=9)), "words", make)
    with pytest.raises(GrammarTooComplex, match="more than 8 alternatives"):
        recipes.term(TermStore(Limits(max_alternatives=8)), "words", make)


def test_a_recipe_with_many_moves_or_words_counts_for_several_steps(
    make: Callable[..., TermStore],
) -> None:
    store = make(Limits())
    small = store.recipe(store.repeat(store.byte_set(bits_of(b"a")), 3, 9))
    assert small is not None
    assert small.size == 2
    states = 400
    moves = [[(bits_of(b"a"), (i + 1) % states), (bits_of(b"b"), 0)] for i in range(states)]
    table = store.recipe(store.table([i == 7 for i in range(states)], moves))
    assert table is not None
    assert table.size >= states
    words = store.recipe(store.words([b"%d" % i + b"x" * 60 for i in range(400)]))
    assert words is not None
    assert words.size >= 400
    kept = Recipes(max_steps=1600)
    kept.term(make(Limits()), "words", lambda kitchen: kitchen.follow(words))
    assert len(kept) == 0
