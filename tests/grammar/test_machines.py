"""The machine in C++ gives the same answers as the one in Python, step by step."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    Limits,
    Matcher,
    Vocabulary,
)
from palmette.grammar.machine import machine_for
from palmette.grammar.structures import Counter, Items, Member, Members, Names, Part, Punctuation
from palmette.grammar.terms import Kind, Rule, bits_of
from palmette.grammar.testing import accepts, brute_force_mask, byte_vocabulary, mask_of
from tests.grammar.random_schemas import RandomSchemas

_native = pytest.importorskip("palmette.grammar._native", reason="the extension was not built")

MORE = rb"""{" ": "," "} ":" ]} [[ ]] ,[ a", a"," "] 00 12 1, null tru e} \u \" ":[ {"na ab "a ,1,1
"a","b" 1,2,3 aab bab a( (a )) ): xx""".split()
vocabulary = byte_vocabulary([*MORE, b"\xc3\xa9", b"\xc3", b"ab"], num_padding=3)
# Bytes that no token has, and bytes that are in tokens only with others.
sparse = Vocabulary([b"a", b"b", b"ab", b"(", b")", b"ba(", b"ca", b"", b'"', b'{"'], {7}, 12)
MACHINES = ("python", "native")


class Pair:
    """Compilers of both machines."""

    def __init__(self, tokens: Vocabulary, **others: Any) -> None:
        self.vocabulary = tokens
        limits = Limits(compile_seconds=3, mask_seconds=3, **others)
        self.compilers = [
            GrammarCompiler(tokens, limits=limits, machine=machine) for machine in MACHINES
        ]

    def compile(
        self, compile_it: Callable[[GrammarCompiler], CompiledGrammar]
    ) -> list[CompiledGrammar] | None:
        """The grammar on each machine; None if both refuse it in the same words."""
        grammars = [answer(lambda c=c: compile_it(c)) for c in self.compilers]
        if any(isinstance(each, str) for each in grammars):
            assert grammars[0] == grammars[1]
            return None
        return grammars

    def check(self, compile_it: Callable[[GrammarCompiler], CompiledGrammar], seed: int) -> None:
        """Follow one random text on both machines and ask everything at each step."""
        grammars = self.compile(compile_it)
        if grammars is None:
            return
        same(grammars, lambda grammar: grammar.shortest_length)
        rng = random.Random(seed)
        matchers = [grammar.matcher() for grammar in grammars]
        for _ in range(25):
            tokens = same(matchers, lambda m: np.flatnonzero(mask_of(m, self.vocabulary)).tolist())
            if isinstance(tokens, str):
                return
            budget = rng.randrange(12)
            self.check_budget(matchers, budget)
            same(matchers, self.questions)
            if not tokens:
                return
            refused = rng.randrange(-1, self.vocabulary.num_rows + 2)
            if refused not in tokens:
                assert not same(matchers, lambda m, t=refused: m.accept(t))
            token_id = rng.choice(tokens)
            assert same(matchers, lambda m, t=token_id: m.accept(t))
            if rng.random() < 0.1:
                num_undone = rng.randint(0, matchers[0].num_tokens)
                same(matchers, lambda m, n=num_undone: m.rollback(n))

    def check_budget(self, matchers: list[Matcher], budget: int) -> None:
        """Of equally long ways to the end each machine may have planned another one."""
        masks = [
            answer(lambda m=m: set(np.flatnonzero(mask_of(m, self.vocabulary, budget=budget))))
            for m in matchers
        ]
        if any(isinstance(each, str) for each in masks):
            assert masks[0] == masks[1]
        else:
            assert len(masks[0] - masks[1]) <= 1
            assert len(masks[1] - masks[0]) <= 1

    @staticmethod
    def questions(m: Matcher) -> object:
        flags = (m.is_complete, m.is_finished, m.num_tokens, m.can_complete(6))
        return flags, m.forced_tokens(4), m.forced_bytes(9), m.extensions(b'{"a', 20)


def answer(ask: Callable[[], Any]) -> Any:
    """What a function gives, or its error as a text."""
    try:
        return ask()
    except GrammarError as error:
        if "s of work" in str(error):  # which is not the same on both
            reject()
        return f"{type(error).__name__}: {error}"


def same(subjects: list[Any], ask: Callable[[Any], Any]) -> Any:
    """The one answer that all of them give."""
    answers = [answer(lambda each=each: ask(each)) for each in subjects]
    assert answers[0] == answers[1]
    return answers[0]


pair = Pair(vocabulary)
sparse_pair = Pair(sparse)
cramped_pair = Pair(vocabulary, max_states=700, max_terms=3000, mask_cache_bytes=1)
seeds = st.integers(0, 2**32)


def regexes() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(["a", "b", "ab", "[^a]", ".", "[a-c]", "(?!ab)", "(?=a)", "é", "$"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("{}{}".format, inner, inner),
            st.builds("(?:{}){}".format, inner, st.sampled_from("*+?") | counts()),
        ),
        max_leaves=8,
    )


def counts() -> st.SearchStrategy[str]:
    return st.builds(
        lambda low, more: f"{{{low},{low + more}}}", st.integers(0, 3), st.integers(0, 40)
    )


@given(regexes(), seeds)
@settings(deadline=None, max_examples=120)
def test_regexes(pattern: str, seed: int) -> None:
    pair.check(lambda compiler: compiler.compile_regex(pattern), seed)
    sparse_pair.check(lambda compiler: compiler.compile_regex(pattern), seed)


@given(st.lists(st.text("ab(é", max_size=6), min_size=1, max_size=8), seeds)
@settings(deadline=None, max_examples=60)
def test_choices(options: list[str], seed: int) -> None:
    pair.check(lambda compiler: compiler.compile_choices(options), seed)
    sparse_pair.check(lambda compiler: compiler.compile_choices(options), seed)


@given(seeds, st.sampled_from(["declared", "any"]))
@settings(deadline=None, max_examples=150)
def test_schemas(seed: int, order: Any) -> None:
    schema = RandomSchemas(seed).draw()
    pair.check(lambda compiler: compiler.compile_json_schema(schema, order=order), seed)


@given(seeds)
@settings(deadline=None, max_examples=40)
def test_schemas_with_hardly_any_room(seed: int) -> None:
    """Tables are dropped at other moments, so only texts and masks are the same."""
    schema = RandomSchemas(seed).draw()
    grammars = pair.compile(lambda compiler: compiler.compile_json_schema(schema))
    if grammars is None:
        return
    try:
        cramped = cramped_pair.compilers[1].compile_json_schema(schema).matcher()
    except GrammarTooComplex:
        return
    matcher = grammars[1].matcher()
    rng = random.Random(seed)
    for _ in range(40):
        mask = mask_of(matcher, vocabulary)
        try:
            assert (mask_of(cramped, vocabulary) == mask).all()
        except GrammarTooComplex:
            return
        token_id = int(rng.choice(np.flatnonzero(mask)))
        assert matcher.accept(token_id)
        assert cramped.accept(token_id)
        if matcher.is_finished:
            return
    cramped.rollback(cramped.num_tokens)
    matcher.rollback(matcher.num_tokens)
    assert (mask_of(cramped, vocabulary) == mask_of(matcher, vocabulary)).all()


GRAMMARS = [
    'root ::= root root root | root root | "a"',
    'root ::= "a" root "b" | "(" root ")" | ""',
    'root ::= "x" | root "a" root | "(" root ")"',
    'root ::= b "b" | c "c" | "x"\nb ::= "a" root\nc ::= "a" root',
    'root ::= item ("," item){2,4}\nitem ::= [a-c]{1,3} | "(" root ")" | "é"',
]


@pytest.mark.parametrize("source", GRAMMARS)
def test_context_free_grammars(source: str) -> None:
    for seed in range(6):
        pair.check(lambda compiler: compiler.compile_grammar(source), seed)
        sparse_pair.check(lambda compiler: compiler.compile_grammar(source), seed)


# Shapes of objects and arrays, straight from the store


def values_of(store: Any) -> list[Any]:
    quote = store.literal(b'"')
    letters = store.repeat(store.byte_set(bits_of(b"ab")), 0, 3)
    return [
        store.literal(b"1"),
        store.words([b"null", b"12", b"ab"]),
        store.lexeme(store.sequence(quote, letters, quote)),
        store.lexeme(store.repeat(store.byte_set(bits_of(b"0123")), 1, None)),
    ]


def punctuation(store: Any) -> Punctuation:
    blank = store.lexeme(store.repeat(store.literal(b" "), 0, 2))
    marks = [store.literal(bytes([each])) for each in b",:[]{}"]
    return Punctuation(blank, *marks)


def random_counters(rng: random.Random) -> tuple[Counter, ...]:
    highs = [rng.choice([None, 0, 1, 2]) for _ in range(rng.randrange(3))]
    return tuple(Counter(rng.randint(0, 2 if high is None else high), high) for high in highs)


def random_parts(rng: random.Random, values: list[Any], num_counters: int) -> tuple[Part[Any], ...]:
    chosen = rng.sample(range(len(values)), rng.randint(1, 2))
    moved = [tuple(i for i in range(num_counters) if rng.random() < 0.5) for _ in chosen]
    return tuple(Part(values[i], counters) for i, counters in zip(chosen, moved, strict=True))


def random_object(rng: random.Random, store: Any) -> Members[Any]:
    values, counters = values_of(store), random_counters(rng)
    keys = rng.sample([b'"a"', b'"ab"', b'"b"', b'"null"', b'"na"'], rng.randrange(5))
    quote = store.literal(b'"')
    name = store.lexeme(store.sequence(quote, store.words([b"x", b"xx", b"y"]), quote))
    names = [Names(name, random_parts(rng, values, len(counters)))] if rng.random() < 0.5 else []
    least = rng.randrange(4)
    return Members(
        punctuation=punctuation(store),
        members=tuple(
            Member(key, random_parts(rng, values, len(counters)), rng.random() < 0.3)
            for key in keys
        ),
        names=tuple(names),
        counters=counters,
        min_members=least,
        max_members=rng.choice([None, None, least, least + 2]),
        order=rng.choice(["declared", "any"]),
        has_distinct_names=rng.random() < 0.5,
    )


def random_array(rng: random.Random, store: Any) -> Items[Any]:
    values, counters = values_of(store), random_counters(rng)
    least = rng.randrange(4)
    return Items(
        punctuation=punctuation(store),
        prefix=tuple(random_parts(rng, values, len(counters)) for _ in range(rng.randrange(3))),
        rest=random_parts(rng, values, len(counters)) if rng.random() < 0.7 else (),
        counters=counters,
        min_items=least,
        max_items=rng.choice([None, None, least, least + 3]),
        is_unique=rng.random() < 0.5,
    )


@given(seeds, st.booleans())
@settings(deadline=None, max_examples=200)
def test_shapes_of_objects_and_arrays(seed: int, is_object: bool) -> None:
    def compile_it(compiler: GrammarCompiler) -> CompiledGrammar:
        machine = machine_for(vocabulary, compiler.limits, compiler.machine)
        store = machine.store()
        store.start_clock(compiler.limits.compile_seconds)
        rng = random.Random(seed)
        if is_object:
            term = store.object(random_object(rng, store))
        else:
            term = store.array(random_array(rng, store))
        return machine.grammar(store, term)

    pair.check(compile_it, seed)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_unique_array_of_values_that_two_places_share_can_be_planned(machine: Any) -> None:
    shared = list(range(10, 16))
    schema = {
        "prefixItems": [{"enum": shared}],
        "items": {"enum": [1, *shared]},
        "minItems": 5,
        "uniqueItems": True,
        "type": "array",
    }
    compiler = GrammarCompiler(byte_vocabulary(), machine=machine)
    assert compiler.compile_json_schema(schema).shortest_length == len("[10,1,11,12,13]")


# Of the extension alone


def native(**limits: Any) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, limits=Limits(**limits), machine="native")


@pytest.mark.parametrize("machine", MACHINES)
def test_a_packed_row_holds_the_same_tokens_as_one_of_bools(machine: Any) -> None:
    compiler = GrammarCompiler(vocabulary, machine=machine)
    matcher = compiler.compile_json_schema({"type": "array", "minItems": 1}).matcher()
    packed = np.full(-(-vocabulary.num_rows // 32), -1, np.int32)
    for text in (b"", b"[", b'["', b'["a', b'["a"]'):
        matcher.rollback(matcher.num_tokens)
        assert all(map(matcher.accept, text))
        for budget in (None, 2):
            matcher.fill_mask(packed, budget=budget)
            bits = np.unpackbits(packed.view(np.uint8), bitorder="little")
            expected = mask_of(matcher, vocabulary, budget=budget)
            assert (bits[: vocabulary.num_rows] == expected).all()
            assert not bits[vocabulary.num_rows :].any()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "row",
    [
        np.zeros(vocabulary.num_rows - 1, bool),
        np.zeros(vocabulary.num_rows, np.uint8),
        np.zeros((1, vocabulary.num_rows), bool),
        np.zeros(2 * vocabulary.num_rows, bool)[::2],
        np.zeros(vocabulary.num_rows, np.int32),
        np.broadcast_to(np.zeros(1, bool), vocabulary.num_rows),
    ],
)
def test_a_row_of_the_wrong_kind_is_refused(machine: Any, row: np.ndarray) -> None:
    matcher = GrammarCompiler(vocabulary, machine=machine).compile_regex("a").matcher()
    with pytest.raises(
        ValueError, match=rf"row must be bool \[{vocabulary.num_rows}\] or int32 \["
    ):
        matcher.fill_mask(row)


def test_terms_are_the_same_object_while_they_live_and_tell_what_they_are() -> None:
    store = native()._machine.store()
    term = store.sequence(store.literal(b"ab"), store.repeat(store.byte_set(1 << 99), 1, 3))
    assert store.sequence(store.literal(b"ab"), store.repeat(store.byte_set(1 << 99), 1, 3)) is term
    assert term.kind is Kind.SEQUENCE
    assert [each.kind for each in term.spine] == [Kind.WORDS, Kind.REPEAT]
    assert (term.spine[1].low, term.spine[1].high) == (1, 3)
    assert term.spine[1].items[0].bits == 1 << 99
    assert term.alternatives == (term,)
    assert term.is_regular
    assert term.is_finite
    assert not term.is_searched
    assert not term.nullable
    assert repr(term).startswith("<sequence ")
    assert list(store.parts(store.byte_set(6))) == [(6, store.epsilon)]
    assert store.shortest(term) == b"abc"
    with pytest.raises(TypeError, match="of another store"):
        native()._machine.store().lexeme(term)
    with pytest.raises(TypeError, match="expected a term of this store, got int"):
        store.lexeme(3)
    del store
    gc.collect()
    with pytest.raises(RuntimeError, match="the store of this term is gone"):
        _ = term.kind


def test_a_grammar_that_nobody_uses_is_collected_though_its_rules_hold_its_store() -> None:
    freed = []

    class Held:
        def __del__(self) -> None:
            freed.append(True)

    def make() -> Any:
        machine, held = native()._machine, Held()
        store = machine.store()

        def build() -> Any:
            assert held
            return store.literal(b"ab")

        rule = Rule("ab", build, shortest=build, min_bytes=2)
        return machine.grammar(store, store.call(rule)).matcher()

    matcher = make()
    assert mask_of(matcher, vocabulary).any()
    gc.collect()
    assert not freed
    assert all(map(matcher.accept, b"ab"))
    del matcher
    gc.collect()
    assert freed == [True]


def test_an_error_in_a_rule_comes_through_and_nothing_is_left_half_done() -> None:
    machine = native()._machine
    store = machine.store()
    calls = []

    def build() -> Any:
        calls.append(True)
        if len(calls) == 1:
            raise KeyError("not yet")
        return store.literal(b"ab")

    rule = Rule("late", build, shortest=lambda: store.literal(b"ab"), min_bytes=2)
    matcher = machine.grammar(
        store, store.sequence(store.literal(b"("), store.call(rule))
    ).matcher()
    with pytest.raises(KeyError, match="not yet"):
        matcher.fill_mask(np.zeros(vocabulary.num_rows, bool))
    assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()
    assert len(calls) == 2


def test_a_rule_that_uses_its_own_grammar_is_told_so() -> None:
    machine = native()._machine
    store = machine.store()
    found: list[Matcher] = []
    rule = Rule(
        "own",
        lambda: (mask_of(found[0], vocabulary), store.epsilon)[1],
        shortest=lambda: store.epsilon,
        min_bytes=1,
    )
    found.append(machine.grammar(store, store.call(rule)).matcher())
    with pytest.raises(RuntimeError, match="uses the grammar while it is built"):
        mask_of(found[0], vocabulary)


def test_deep_terms_take_no_stack() -> None:
    store = native(max_terms=1_000_000)._machine.store()
    term = store.epsilon
    for number in range(50_000):
        option = store.alternation((term, store.literal(b"a")))
        term = store.sequence(store.byte_set(1 << (number % 200)), option)
    assert store.min_bytes(term) == 2
    nested = store.literal(b"a")
    for _ in range(50_000):
        nested = store.lexeme(store.repeat(store.alternation((nested, store.literal(b"b"))), 2, 3))
    with pytest.raises(GrammarTooComplex, match="nested too deeply"):
        store.parts(nested)


def test_another_thread_comes_in_while_a_mask_takes_long() -> None:
    hopeless = "(?=(?:.{7})*$)(?=(?:.{11})*$)(?=(?:.{13})*$)(?=(?:.{17})*$)(?=(?:.{19})*$).+"
    late = (
        native(mask_seconds=0.5, max_terms=10_000_000).compile_regex(f"a|b(?:{hopeless})").matcher()
    )
    quick = native().compile_regex("(?:ab)*").matcher()
    outcome: list[str] = []

    def work() -> None:
        with pytest.raises(GrammarTooComplex) as caught:
            mask_of(late, vocabulary)
        outcome.append(str(caught.value))

    worker = threading.Thread(target=work)
    worker.start()
    num_masks = 0
    while worker.is_alive() and num_masks < 10_000:
        assert mask_of(quick, vocabulary).any()
        num_masks += 1
    worker.join()
    assert num_masks > 1
    assert outcome == ["the grammar needs more than 0.5 s of work"]


def test_matchers_of_one_grammar_wait_for_each_other() -> None:
    grammar = native(max_states=2000).compile_json_schema({})
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(5):
                matcher = grammar.matcher()
                for _ in range(25):
                    mask = mask_of(matcher, vocabulary)
                    assert matcher.accept(int(rng.choice(np.flatnonzero(mask))))
                    if matcher.is_finished:
                        break
        except BaseException as error:  # shown below, in the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_long_output_is_followed_through_many_generations() -> None:
    grammar = native(max_states=300, max_terms=3000).compile_json_schema({"type": "array"})
    matcher = grammar.matcher()
    for _ in range(400):
        assert all(map(matcher.accept, b'[[1,{"k":[2,{"":'))
        mask_of(matcher, vocabulary)
        assert grammar.num_states <= 300
    assert grammar.generation > 3
    matcher.rollback(matcher.num_tokens - 2)  # to where long-dropped states were
    assert (mask_of(matcher, vocabulary) == brute_force_mask(matcher, vocabulary)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_planning_the_same_text_again_and_again_takes_no_more_memory() -> None:
    names = [f"{number:0200}" for number in range(40)]
    schema = {
        "type": "object",
        "properties": {name: {"const": None} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    matcher = native().compile_json_schema(schema).matcher()
    num_bytes = []
    for _ in range(2):
        for _ in range(1000):
            assert not matcher.can_complete(3)
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        num_bytes.append(num_pages * os.sysconf("SC_PAGE_SIZE"))
    assert num_bytes[1] - num_bytes[0] < 4 << 20


# Choosing


def test_the_environment_chooses_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MACHINES:
        monkeypatch.setenv("PALMETTE_GRAMMAR", name)
        assert GrammarCompiler(vocabulary).machine == name
    monkeypatch.delenv("PALMETTE_GRAMMAR")
    assert GrammarCompiler(vocabulary).machine == "native"
    monkeypatch.setenv("PALMETTE_GRAMMAR", "rust")
    with pytest.raises(ValueError, match="PALMETTE_GRAMMAR is 'native' or 'python', got 'rust'"):
        GrammarCompiler(vocabulary)
    with pytest.raises(ValueError, match="machine is 'native' or 'python', got 'x'"):
        GrammarCompiler(vocabulary, machine="x")


@pytest.mark.parametrize("machine", MACHINES)
def test_both_machines_are_the_whole_engine(machine: Any) -> None:
    compiler = GrammarCompiler(vocabulary, machine=machine)
    grammar = compiler.compile_json_schema({"enum": [1, {"a": "é"}]})
    assert isinstance(grammar.matcher(), Matcher)
    assert isinstance(grammar.matcher().copy(), Matcher)
    assert accepts(grammar, json.dumps({"a": "é"}, ensure_ascii=False, separators=(",", ":")))
