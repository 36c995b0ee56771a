"""Regular terms as plain data, so that what many grammars have in common is worked out once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from palmette.grammar.terms import CONTEXT_FREE, Kind, Table, Term

if TYPE_CHECKING:
    from palmette.grammar.term_store import TermStore

# Steps of all recipes that are kept, some hundred bytes each; one with many words or moves counts
# for several.
_MAX_STEPS = 100_000


class Step(NamedTuple):
    """One term, made of those of earlier steps, and what is known of it."""

    kind: Kind
    items: tuple[int, ...]
    bits: int
    low: int
    high: int | None
    words: tuple[bytes, ...]
    table: Table | None
    is_character: bool
    known_empty: bool | None
    shortest_length: int | None
    shortest: bytes | None


class Recipe:
    """How to make a regular term in any store with the same alphabet."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps

    @cached_property
    def size(self) -> int:
        """How much memory it takes, in steps of the ordinary size."""
        return sum(
            1
            + sum(map(len, each.words)) // 64
            + len(each.words) // 4
            + (len(each.shortest) // 256 if each.shortest else 0)
            + (sum(map(len, each.table.moves)) // 2 if each.table else 0)
            for each in self.steps
        )


def recipe_of(root: Term, anything: Term, characters: set[Term]) -> Recipe | None:
    """The recipe of a term; None if it is not regular, or a place in the middle of an automaton."""
    # What a term is made of is older than it, so that by age each comes after its items.
    found: dict[int, Term] = {}
    pending = [root]
    while pending:
        term = pending.pop()
        if term.serial in found:
            continue
        if term.kind in CONTEXT_FREE or (term.kind == Kind.TABLE and term.depth):
            return None
        found[term.serial] = term
        pending.extend(term.items)
    terms = [found[serial] for serial in sorted(found)]
    index = {term: i for i, term in enumerate(terms)}
    return Recipe(
        tuple(
            Step(
                term.kind,
                () if term is anything else tuple(index[item] for item in term.items),
                term.bits,
                term.low,
                term.high,
                ()
                if term.words is None
                else tuple(w[term.depth :] for w in term.words.words[term.low : term.high]),
                term.table,
                term in characters,
                term.known_empty,
                term.shortest_length,
                term.shortest,
            )
            for term in terms
        )
    )


def follow(recipe: Recipe, store: TermStore) -> Term:
    """The term of the recipe."""
    made: list[Term] = []
    for step in recipe.steps:
        term = _make(store, step, [made[i] for i in step.items])
        if step.is_character:
            store.mark_character(term)
        if term.known_empty is None:
            term.known_empty = step.known_empty
        if term.shortest_length is None:
            term.shortest_length = step.shortest_length
        if term.shortest is None:
            term.shortest = step.shortest
        made.append(term)
    return made[-1]


def _make(store: TermStore, step: Step, items: list[Term]) -> Term:
    kind = step.kind
    if kind == Kind.BYTES:
        return store.byte_set(step.bits)
    if kind == Kind.WORDS:
        return store.words(step.words)
    if kind == Kind.SEQUENCE:
        return store.sequence(*items)
    if kind == Kind.ALTERNATION:
        return store.alternation(items)
    if kind == Kind.REPEAT:
        return store.repeat(items[0], step.low, step.high)
    if kind == Kind.BOTH:
        return store.both(*items)
    if kind == Kind.NOT:
        return store.complement(items[0]) if items else store.anything
    if kind == Kind.LEXEME:
        return store.lexeme(items[0])
    if step.table is not None:
        return store.table(step.table.accepting, step.table.moves)
    return store.empty if kind == Kind.EMPTY else store.epsilon


class Recipes:
    """The recipes that were asked for last. Thread-safe."""

    def __init__(self, max_steps: int = _MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._num_steps = 0
        self._known: OrderedDict[Hashable, Recipe] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def term(self, store: TermStore, key: Hashable, make: Callable[[TermStore], Term]) -> Term:
        """What `make` makes of a store, which depends on `key` alone.

        It is asked for that once, in a store of its own, so that the term does not depend on what
        else there is in a store. What it raises is raised, and nothing is kept then.
        """
        key = (type(store), store.alphabet, key)
        with self._lock:
            recipe = self._known.get(key)
            if recipe is not None:
                self._known.move_to_end(key)
        if recipe is None:
            kitchen = type(store)(store.limits, store.alphabet)
            kitchen.share_clock(store)
            term = make(kitchen)
            if not kitchen.is_empty(term):
                kitchen.min_bytes(term)
            recipe = kitchen.recipe(term)
            if recipe is None:
                return make(store)
            self._keep(key, recipe)
        return store.follow(recipe)

    def _keep(self, key: Hashable, recipe: Recipe) -> None:
        with self._lock:
            if key in self._known or recipe.size > self._max_steps // 16:
                return
            self._known[key] = recipe
            self._num_steps += recipe.size
            while self._num_steps > self._max_steps:
                _, oldest = self._known.popitem(last=False)
                self._num_steps -= oldest.size


# For all grammars of the process.
RECIPES = Recipes()
