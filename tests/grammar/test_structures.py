from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import CompiledGrammar, GrammarTooComplex, Limits
from palmette.grammar.mask import SharedMasks
from palmette.grammar.moves import Cheapest, cheapest
from palmette.grammar.structures import (
    Counter,
    Items,
    Member,
    Members,
    Names,
    Part,
    Punctuation,
)
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term, bits_of
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of, text_of

LONGEST = 14  # bytes of the texts that are enumerated

MORE = rb"""{a {ab ,a ,b a: b:1 :1 1, 2, 1] 1} 2} [1 [2 ,1 ,2 1,1 2,2, 1,a x: ,x xy :2, }} ]]""".split()
vocabulary = byte_vocabulary(MORE)
STOP = 256 + len(MORE)

Shape = Members[tuple[bytes, ...]] | Items[tuple[bytes, ...]]


def new_store(limits: Limits | None = None) -> TermStore:
    store = TermStore(limits or Limits(), vocabulary.alphabet)
    store.start_clock(20)
    return store


def punctuation(store: TermStore, blank: Term | None = None) -> Punctuation:
    mark = [store.byte_set(bits_of([byte])) for byte in b",:[]{}"]
    return Punctuation(blank or store.epsilon, *mark)


def compiled(store: TermStore, term: Term) -> CompiledGrammar:
    return CompiledGrammar(vocabulary, store, term, SharedMasks(1 << 20), store.limits)


def term_of(store: TermStore, shape: Shape) -> Term:
    with_terms = shape.with_values(store.words)
    if with_terms is None:
        return store.empty
    if isinstance(with_terms, Members):
        return store.object(with_terms)
    return store.array(with_terms)


# Every text of a shape, by trying everything


def counts_fit(counters: tuple[Counter, ...], moved: list[int], is_whole: bool = True) -> bool:
    return all(
        (high is None or count <= high) and (count >= low or not is_whole)
        for (low, high), count in zip(counters, moved, strict=True)
    )


def all_texts(store: TermStore, shape: Shape, longest: int = LONGEST) -> set[bytes]:
    if isinstance(shape, Items):
        counters = (Counter(shape.min_items, shape.max_items), *shape.counters)
        texts = all_arrays(shape, counters, [0] * len(counters), b"", longest - 2)
        return {b"[" + text + b"]" for text in texts}
    counters = (Counter(shape.min_members, shape.max_members), *shape.counters)
    texts = all_objects(store, shape, counters, [0] * len(counters), (), b"", longest - 2)
    return {b"{" + text + b"}" for text in texts}


def after_part(moved: list[int], part: Part[tuple[bytes, ...]]) -> list[int]:
    return [count + (index == 0 or index - 1 in part.counters) for index, count in enumerate(moved)]


def all_arrays(
    shape: Items[tuple[bytes, ...]],
    counters: tuple[Counter, ...],
    moved: list[int],
    text: bytes,
    room: int,
) -> Iterator[bytes]:
    if len(text) > room or not counts_fit(counters, moved, is_whole=False):
        return
    if counts_fit(counters, moved):
        yield text
    index = moved[0]
    for part in shape.prefix[index] if index < len(shape.prefix) else shape.rest:
        for value in part.value:
            longer = text + b"," * (index > 0) + value
            yield from all_arrays(shape, counters, after_part(moved, part), longer, room)


def all_objects(
    store: TermStore,
    shape: Members[tuple[bytes, ...]],
    counters: tuple[Counter, ...],
    moved: list[int],
    came: tuple[int, ...],
    text: bytes,
    room: int,
) -> Iterator[bytes]:
    if len(text) > room or not counts_fit(counters, moved, is_whole=False):
        return
    num_declared = len(shape.members)
    is_missing = any(m.is_required and i not in came for i, m in enumerate(shape.members))
    if counts_fit(counters, moved) and not is_missing:
        yield text
    options: list[tuple[int, bytes, tuple[Part[tuple[bytes, ...]], ...]]] = []
    for i, member in enumerate(shape.members):
        if i not in came and (shape.order == "any" or not came or i > max(came)):
            options.append((i, member.key, member.parts))
    for names in shape.names:
        options += ((num_declared, name, names.parts) for name in texts_of(store, names.name))
    for i, key, parts in options:
        for part in parts:
            for value in part.value:
                longer = text + b"," * bool(text) + key + b":" + value
                yield from all_objects(
                    store, shape, counters, after_part(moved, part), (*came, i), longer, room
                )


def texts_of(store: TermStore, term: Term, longest: int = LONGEST) -> set[bytes]:
    """What the machine makes of a term, up to a length."""
    found = set()
    pending = [(b"", term)]
    while pending:
        text, here = pending.pop()
        if here.nullable:
            found.add(text)
        assert here.nullable or list(store.parts(here)), f"a dead end after {text!r}"
        if len(text) < longest:
            for bits, after in store.parts(here):
                pending += ((text + bytes([b]), after) for b in range(256) if bits >> b & 1)
    return found


# Random shapes

VALUES = [(b"1",), (b"2", b"21"), (b"3",), (b"[1]",), (b"45", b"46")]


@st.composite
def place_parts(draw: st.DrawFn, num_counters: int) -> tuple[Part[tuple[bytes, ...]], ...]:
    values = draw(st.permutations(VALUES))[: draw(st.integers(1, 3))]
    moved = st.lists(st.integers(0, num_counters - 1), unique=True, max_size=num_counters)
    return tuple(
        Part(value, tuple(sorted(draw(moved))) if num_counters else ()) for value in values
    )


counter = st.builds(
    lambda low, more: Counter(low, None if more is None else low + more),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([None, None, 0, 1]),
)


@st.composite
def arrays(draw: st.DrawFn) -> Items[tuple[bytes, ...]]:
    counters = tuple(draw(st.lists(counter, max_size=2)))
    parts = place_parts(len(counters))
    low = draw(st.sampled_from([0, 0, 1, 2, 3]))
    return Items(
        punctuation=punctuation(new_store()),
        prefix=tuple(draw(st.lists(parts, max_size=3))),
        rest=draw(st.one_of(st.just(()), parts)),
        counters=counters,
        min_items=low,
        max_items=draw(st.sampled_from([None, None, low, low + 1, 4])),
    )


@st.composite
def objects(draw: st.DrawFn) -> Members[tuple[bytes, ...]]:
    counters = tuple(draw(st.lists(counter, max_size=2)))
    parts = place_parts(len(counters))
    keys = draw(st.permutations([b"a", b"ab", b"b", b"c"]))[: draw(st.integers(0, 4))]
    members = tuple(Member(key, draw(parts), draw(st.booleans())) for key in keys)
    names = draw(st.permutations([(b"x",), (b"ac", b"y")]))[: draw(st.integers(0, 2))]
    low = draw(st.sampled_from([0, 0, 1, 2]))
    store = new_store()
    return Members(
        punctuation=punctuation(store),
        members=members,
        names=tuple(Names(store.words(each), draw(parts)) for each in names),
        counters=counters,
        min_members=low,
        max_members=draw(st.sampled_from([None, None, low, low + 1, 3])),
        order=draw(st.sampled_from(["declared", "any"])),
    )


def in_store(store: TermStore, shape: Shape) -> Shape:
    """The shape with the terms of another store."""
    from dataclasses import replace

    old = new_store()
    changed = replace(shape, punctuation=punctuation(store))
    if isinstance(changed, Members):
        names = tuple(
            Names(store.words(texts_of(old, each.name)), each.parts) for each in changed.names
        )
        changed = replace(changed, names=names)
    return changed


@settings(max_examples=150, deadline=None)
@given(shape=st.one_of(arrays(), objects()))
def test_a_shape_has_exactly_the_texts_of_its_definition(shape: Shape) -> None:
    store = new_store()
    shape = in_store(store, shape)
    term = term_of(store, shape)
    expected = all_texts(store, shape)
    if term is store.empty:
        assert not expected
        return
    assert texts_of(store, term) == expected
    if expected:
        assert store.min_bytes(term) == min(map(len, expected))
    else:
        assert store.min_bytes(term) > LONGEST


@settings(max_examples=100, deadline=None)
@given(shape=st.one_of(arrays(), objects()), known=st.permutations(VALUES), num=st.integers(0, 5))
def test_the_cheapest_text_is_known_before_there_are_terms(
    shape: Shape, known: list[tuple[bytes, ...]], num: int
) -> None:
    store = new_store()
    shape = in_store(store, shape)
    told = sorted(known[:num], key=lambda value: len(value[0]))
    hope = Cheapest(shape, store)
    for value in told:
        before = hope.num_bytes
        assert hope.learn(value, len(value[0])) == (hope.num_bytes != before)
    possible = shape.with_values(lambda value: store.words(value) if value in told else None)
    assert hope.num_bytes == cheapest(
        shape, lambda value: len(value[0]) if value in told else None, store
    )
    if possible is None:
        assert hope.num_bytes is None
        return
    term = store.object(possible) if isinstance(possible, Members) else store.array(possible)
    assert hope.num_bytes == (None if term is store.empty else store.min_bytes(term))
