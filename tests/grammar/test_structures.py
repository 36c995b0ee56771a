from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    Limits,
    UnsupportedGrammar,
)
from palmette.grammar.mask import SharedMasks
from palmette.grammar.moves import Cheapest, cheapest
from palmette.grammar.structures import (
    Counter,
    Items,
    Member,
    Members,
    Names,
    Order,
    Part,
    Punctuation,
)
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Rule, Term, bits_of
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of, text_of

LONGEST = 14  # bytes of the texts that are enumerated

MORE = b"{a {ab ,a ,b a: b:1 :1 1, 2, 1] 1} 2} [1 [2 ,1 ,2 1,1 2,2, 1,a x: ,x xy :2, }} ]]".split()
MORE += b'[" "," "q" "q","q "q","q","qq qq" "",""] 7,7 77,7] ,77 ":1,"q": {"q" 7] "]'.split()
MORE += b'":1,"q":1} q","q" q","q 1,1] 1,45,1'.split()
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


ENDLESS = [
    tuple(b'"' + b"q" * n + b'"' for n in range(LONGEST)),
    tuple(b"7" * n for n in range(1, LONGEST)),
]


def value_term(store: TermStore, value: tuple[bytes, ...]) -> Term:
    if value not in ENDLESS:
        return store.words(value)
    quote = store.literal(b'"' if value is ENDLESS[0] else b"")
    letter = store.literal(b"q" if value is ENDLESS[0] else b"7")
    low = 0 if value is ENDLESS[0] else 1
    return store.lexeme(store.sequence(quote, store.repeat(letter, low, None), quote))


def term_of(store: TermStore, shape: Shape) -> Term:
    with_terms = shape.with_values(lambda value: value_term(store, value))
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
        texts = all_arrays(shape, counters, [0] * len(counters), (), longest - 2)
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
    items: tuple[bytes, ...],
    room: int,
) -> Iterator[bytes]:
    text = b",".join(items)
    if len(text) > room or not counts_fit(counters, moved, is_whole=False):
        return
    if counts_fit(counters, moved):
        yield text
    index = moved[0]
    for part in shape.prefix[index] if index < len(shape.prefix) else shape.rest:
        for value in part.value:
            if not (shape.is_unique and value in items):
                after = after_part(moved, part)
                yield from all_arrays(shape, counters, after, (*items, value), room)


def all_objects(
    store: TermStore,
    shape: Members[tuple[bytes, ...]],
    counters: tuple[Counter, ...],
    moved: list[int],
    came: tuple[int | bytes, ...],
    text: bytes,
    room: int,
) -> Iterator[bytes]:
    if len(text) > room or not counts_fit(counters, moved, is_whole=False):
        return
    indices = [i if isinstance(i, int) else len(shape.members) for i in came]
    is_missing = any(m.is_required and i not in came for i, m in enumerate(shape.members))
    if counts_fit(counters, moved) and not is_missing:
        yield text
    options: list[tuple[int | bytes, bytes, tuple[Part[tuple[bytes, ...]], ...]]] = []
    for i, member in enumerate(shape.members):
        if i not in came and (shape.order == "any" or all(j < i for j in indices)):
            options.append((i, member.key, member.parts))
    for names in shape.names:
        options += (
            (name, name, names.parts)
            for name in texts_of(store, names.name)
            if not (shape.has_distinct_names and name in came)
        )
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

VALUES = [(b"1",), (b"2", b"21"), (b"3",), (b"[1]",), (b"45", b"46"), *ENDLESS]


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
        is_unique=draw(st.booleans()),
    )


@st.composite
def objects(draw: st.DrawFn) -> Members[tuple[bytes, ...]]:
    counters = tuple(draw(st.lists(counter, max_size=2)))
    parts = place_parts(len(counters))
    keys = draw(st.permutations([b"a", b"ab", b"b", b"c"]))[: draw(st.integers(0, 4))]
    members = tuple(Member(key, draw(parts), draw(st.booleans())) for key in keys)
    names = draw(st.permutations([(b"x",), (b"ac", b"y"), ENDLESS[0]]))[: draw(st.integers(0, 2))]
    low = draw(st.sampled_from([0, 0, 1, 2]))
    store = new_store()
    return Members(
        punctuation=punctuation(store),
        members=members,
        names=tuple(Names(value_term(store, each), draw(parts)) for each in names),
        counters=counters,
        min_members=low,
        max_members=draw(st.sampled_from([None, None, low, low + 1, 3])),
        order=draw(st.sampled_from(["declared", "any"])),
        has_distinct_names=draw(st.booleans()),
    )


def is_distinct(shape: Shape) -> bool:
    return shape.is_unique if isinstance(shape, Items) else shape.has_distinct_names


def as_value(texts: set[bytes]) -> tuple[bytes, ...]:
    known = [value for value in ENDLESS if texts and texts <= set(value)]
    return known[0] if known else tuple(sorted(texts))


def in_store(store: TermStore, shape: Shape) -> Shape:
    """The shape with the terms of another store."""
    old = new_store()
    changed = replace(shape, punctuation=punctuation(store))
    if isinstance(changed, Members):
        names = tuple(
            Names(value_term(store, as_value(texts_of(old, each.name))), each.parts)
            for each in changed.names
        )
        changed = replace(changed, names=names)
    return changed


@settings(max_examples=80, deadline=None)
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
    if is_distinct(shape):
        return  # how long the texts are is told by their plans only
    if expected:
        assert store.min_bytes(term) == min(map(len, expected))
    else:
        assert store.min_bytes(term) > LONGEST


def test_names_that_may_be_used_up_in_vain_are_counted() -> None:
    store = new_store()
    names = Names(value_term(store, (b"ac", b"y")), (Part((b"1",)), Part((b"2", b"21"), (0,))))
    shape = Members(
        punctuation=punctuation(store),
        members=(),
        names=(names,),
        counters=(Counter(1),),
        has_distinct_names=True,
    )
    assert texts_of(store, term_of(store, shape)) == all_texts(store, shape)


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
    possible = shape.with_values(lambda value: value_term(store, value) if value in told else None)
    if is_distinct(shape):
        return  # whether there are texts enough is not looked at before there are terms
    assert hope.num_bytes == cheapest(
        shape, lambda value: len(value[0]) if value in told else None, store
    )
    if possible is None:
        assert hope.num_bytes is None
        return
    term = store.object(possible) if isinstance(possible, Members) else store.array(possible)
    assert hope.num_bytes == (None if term is store.empty else store.min_bytes(term))


@settings(max_examples=100, deadline=None)
@given(shape=st.one_of(arrays(), objects()), seed=st.integers(0, 999))
def test_masks_are_those_of_trying_each_token_and_never_empty(shape: Shape, seed: int) -> None:
    store = new_store()
    term = term_of(store, in_store(store, shape))
    if term is store.empty:
        return
    generator = random.Random(seed)
    grammar = compiled(store, term)
    matcher = grammar.matcher()
    for _ in range(20):
        mask = mask_of(matcher, vocabulary)
        np.testing.assert_array_equal(mask, brute_force_mask(matcher, vocabulary))
        after = [int(token_id) for token_id in np.flatnonzero(mask) if token_id != STOP]
        if not after:
            assert matcher.is_complete
            return
        assert matcher.accept(generator.choice(after))


@settings(max_examples=100, deadline=None)
@given(
    shape=st.one_of(arrays(), objects()),
    seed=st.integers(0, 999),
    more=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_whoever_follows_the_masks_of_a_budget_ends_within_it(
    shape: Shape, seed: int, more: int
) -> None:
    store = new_store()
    term = term_of(store, in_store(store, shape))
    if term is store.empty:
        return
    generator = random.Random(seed)
    grammar = compiled(store, term)
    matcher = grammar.matcher()
    budget = grammar.shortest_length + more
    for left in range(budget, 0, -1):
        mask = mask_of(matcher, vocabulary, budget=left)
        assert not (mask & ~brute_force_mask(matcher, vocabulary)).any()
        after = [int(token_id) for token_id in np.flatnonzero(mask) if token_id != STOP]
        if not after:
            break
        assert matcher.accept(generator.choice(after))
    assert matcher.is_complete


def quoted(store: TermStore) -> Term:
    letters = store.byte_set(bits_of(b"abcdefghijklmnopqrstuvwxyz"))
    quote = store.byte_set(bits_of(b'"'))
    return store.lexeme(store.sequence(quote, store.repeat(letters, 0, None), quote))


@pytest.mark.parametrize("order", ["declared", "any"])
@pytest.mark.parametrize("low", [0, 3])
def test_an_object_of_thousands_of_members_takes_a_few_terms_for_each_step(
    order: Order, low: int
) -> None:
    store = new_store(Limits(compile_seconds=20))
    number = store.words([b"1", b"2"])
    members = tuple(
        Member(b'"key%d"' % i, (Part(number),), is_required=i % 100 == 0) for i in range(5000)
    )
    shape = Members(punctuation=punctuation(store), members=members, min_members=low, order=order)
    term = store.object(shape)
    grammar = compiled(store, term)
    due = members[::100]
    text = b"{" + b",".join(member.key + b":1" for member in due) + b"}"
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace(b'"key300"', b'"key3000"'))
    assert store.min_bytes(term) == len(text)
    assert len(store) < 60 * len(text)


def test_a_count_of_a_million_is_worked_out_at_once() -> None:
    store = new_store()
    one, two = Part(store.words([b"1"]), (0,)), Part(store.words([b"22"]))
    marks = punctuation(store)
    array = store.array(
        Items(punctuation=marks, rest=(one, two), counters=(Counter(2, 5),), min_items=10**6)
    )
    assert store.min_bytes(array) == 2 + 5 * 2 + (10**6 - 5) * 3 - 1
    names = Names(quoted(store), (two,))
    member = Members(punctuation=marks, names=(names,), min_members=10**6)
    assert store.min_bytes(store.object(member)) == 1 + 10**6 * len(b'"":22,')


def test_counters_that_nothing_can_satisfy_together_leave_no_text() -> None:
    store = new_store()
    a, b = (Part(store.words([text]), (i,)) for i, text in enumerate([b"1", b"2"]))
    marks = punctuation(store)
    counters = (Counter(2, None), Counter(2, None))
    items = {"punctuation": marks, "rest": (a, b), "counters": counters}
    assert store.array(Items(**items, max_items=3)) is store.empty
    assert store.array(Items(**items, max_items=4)) is not store.empty
    both = store.array(Items(**items, max_items=4))
    grammar = compiled(store, both)
    assert accepts(grammar, "[1,2,2,1]")
    assert not accepts(grammar, "[1,1,1")


def test_members_that_are_not_declared_come_last_in_declared_order_and_anywhere_in_any() -> None:
    for order in ("declared", "any"):
        store = new_store()
        value = (Part(store.words([b"1"])),)
        shape = Members(
            punctuation=punctuation(store),
            members=(Member(b"a", value, True), Member(b"b", value)),
            names=(Names(store.words([b"x"]), value),),
            order=order,
        )
        grammar = compiled(store, store.object(shape))
        assert accepts(grammar, "{a:1,x:1}")
        assert accepts(grammar, "{x:1,a:1}") == (order == "any")
        assert accepts(grammar, "{b:1,a:1}") == (order == "any")
        assert not accepts(grammar, "{a:1,a:1}")
        assert not accepts(grammar, "{b:1}")


def test_a_search_without_end_in_sight_is_given_up() -> None:
    store = TermStore(Limits(), vocabulary.alphabet)
    store.start_clock(0.05)
    generator = random.Random(0)
    parts = [Part(store.words([b"%d" % i]), (i % 6, (i * 5 + 1) % 6)) for i in range(30)]
    members = tuple(Member(b"k%03d" % i, tuple(generator.sample(parts, 3))) for i in range(300))
    counters = tuple(Counter(40 + i, 45 + i) for i in range(6))
    shape = Members(punctuation=punctuation(store), members=members, counters=counters)
    with pytest.raises(GrammarTooComplex, match=r"more than 0\.05 s of work"):
        store.object(shape)


@settings(max_examples=100, deadline=None)
@given(shape=st.one_of(arrays(), objects()))
def test_the_plan_of_a_shape_is_one_of_its_shortest_texts(shape: Shape) -> None:
    store = new_store()
    term = term_of(store, in_store(store, shape))
    if term is store.empty:
        return
    grammar = compiled(store, term)
    plan = grammar.planner.plan(term)
    assert plan is not None
    text = text_of(vocabulary, plan)
    if is_distinct(shape):
        assert len(text) >= store.min_bytes(term)
    else:
        assert len(text) == store.min_bytes(term)
    assert accepts(grammar, text)


@pytest.mark.parametrize(
    ("source", "text", "end"),
    [
        ('root ::= root root root | root root | "a"', "a" * 300, ""),
        ('root ::= "a" root "a" | "b" root "b" | ""', "ab" * 150, "ba" * 150),
        (
            'root ::= b "b" | c "c" | "x"\nb ::= "a" root\nc ::= "a" root',
            "a" * 300,
            "xb" + "c" * 299,
        ),
        ('root ::= "i" root | "i" root "e" root | "x"', "i" * 300, "x" + "ex" * 200),
    ],
)
def test_an_ambiguous_grammar_has_about_as_many_terms_as_its_text_has_bytes(
    source: str, text: str, end: str
) -> None:
    grammar = GrammarCompiler(vocabulary).compile_grammar(source)
    assert accepts(grammar, text + end)
    assert not accepts(grammar, text + "c")
    assert grammar.num_terms < 20 * len(text + end)


def test_a_rule_that_begins_with_itself_is_refused_by_name() -> None:
    store = new_store()
    rule = Rule(
        "sum",
        lambda: store.alternation((store.sequence(store.call(rule), marks.comma), marks.comma)),
        shortest=lambda: marks.comma,
        min_bytes=1,
    )
    marks = punctuation(store)
    with pytest.raises(GrammarTooComplex, match="sum begins with itself"):
        list(store.parts(store.call(rule)))


@pytest.mark.parametrize("num_items", [0, 1, 3])
def test_items_that_must_differ_are_told_apart_within_one_token(num_items: int) -> None:
    store = new_store()
    parts = (Part(quoted(store)), Part(store.words([b"1"])))
    marks = punctuation(store)
    term = store.array(Items(punctuation=marks, rest=parts, min_items=num_items, is_unique=True))
    grammar = compiled(store, term)
    matcher = grammar.matcher()
    assert accepts(grammar, '["q","qq","",1]')
    assert not accepts(grammar, '["q","qq","q"]')
    assert not accepts(grammar, "[1,1]")
    again, other = MORE.index(b'q","q"'), MORE.index(b'q","q')
    for byte in b'["':
        assert matcher.accept(byte)
    mask = mask_of(matcher, vocabulary)
    assert not mask[256 + again]
    assert mask[256 + other]
    np.testing.assert_array_equal(mask, brute_force_mask(matcher, vocabulary))


def test_a_unique_array_of_few_values_is_as_long_as_there_are_values() -> None:
    store = new_store()
    marks = punctuation(store)
    rest = (Part(store.words([b"%d" % i for i in range(60)])),)
    for low in (60, 61):
        shape = Items(punctuation=marks, rest=rest, min_items=low, is_unique=True)
        term = store.array(shape)
        assert (term is store.empty) == (low == 61)
    grammar = compiled(store, store.array(replace(shape, min_items=60)))
    text = "[" + ",".join(map(str, reversed(range(60)))) + "]"
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace(",7,", ",8,"))


def test_what_others_leave_of_a_language_that_must_not_repeat_may_be_scarce() -> None:
    store = new_store()
    shared = tuple(b"%d" % number for number in range(10, 16))
    shape = Items(
        punctuation=punctuation(store),
        prefix=((Part(shared),),),
        rest=(Part((b"1", *shared)),),
        min_items=5,
        is_unique=True,
    )
    grammar = compiled(store, term_of(store, shape))
    plan = grammar.planner.plan(grammar.start)
    assert plan is not None
    assert text_of(vocabulary, plan) == b"[10,1,11,12,13]"
    assert grammar.shortest_length == len(plan)


def test_items_that_must_differ_must_be_regular() -> None:
    store = new_store()
    marks = punctuation(store)
    inner = store.array(Items(punctuation=marks))
    with pytest.raises(UnsupportedGrammar, match="no arrays or objects") as caught:
        store.array(Items(punctuation=marks, rest=(Part(inner),), is_unique=True))
    assert caught.value.feature == "uniqueItems"


def test_undeclared_names_that_must_differ_do() -> None:
    store = new_store()
    value = (Part(store.words([b"1"]), (0,)), Part(store.words([b"2"])))
    shape = Members(
        punctuation=punctuation(store),
        members=(Member(b"a", (Part(store.words([b"1"])),)),),
        names=(Names(quoted(store), value),),
        counters=(Counter(2, None),),
        has_distinct_names=True,
    )
    grammar = compiled(store, store.object(shape))
    assert accepts(grammar, '{a:1,"x":1,"y":2,"z":1}')
    assert not accepts(grammar, '{a:1,"x":1,"x":1}')
    assert not accepts(grammar, '{a:1,"x":1,"y":2}')
    plan = grammar.planner.plan(grammar.start)
    assert plan is not None
    assert text_of(vocabulary, plan) == b'{"":1,"a":1}'


def test_a_comma_is_not_allowed_once_every_value_has_come() -> None:
    store = new_store()
    marks = punctuation(store)
    rest = (Part(store.words([b"1"])),)
    grammar = compiled(store, store.array(Items(punctuation=marks, rest=rest, is_unique=True)))
    matcher = grammar.matcher()
    for byte in b"[1]":
        mask = mask_of(matcher, vocabulary)
        assert not mask[256 + MORE.index(b"1,")]
        np.testing.assert_array_equal(mask, brute_force_mask(matcher, vocabulary))
        assert matcher.accept(byte)
    assert matcher.is_finished


def test_kinds_that_share_a_maximum_are_weighed_together() -> None:
    store = new_store()
    kinds = [(b"1", (0,)), (b"22", (0, 1)), (b"55555", ())]
    shape = Items(
        punctuation=punctuation(store),
        rest=tuple(Part(store.words([text]), counters) for text, counters in kinds),
        counters=(Counter(0, 2), Counter(0, 2)),
        min_items=4,
    )
    term = store.array(shape)
    assert store.min_bytes(term) == len("[1,1,55555,55555]")
    assert len(compiled(store, term).planner.plan(term) or ()) <= len("[1,1,55555,55555]")
