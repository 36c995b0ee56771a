"""Every case of `data/field_cases.jsonl`, by its id: faults that others had in the field.

Masks, numbers and lists come from the case itself; programs are written out here.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import palmette as pm
from palmette.grammar import GrammarCompiler, Vocabulary
from palmette.grammar.backends import BACKENDS, BackendNotInstalled, load_backend
from palmette.grammar.testing import allowed, byte_vocabulary
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.protocol import Constraint, Request, SamplingParams
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.constraints import ConstraintCompiler
from palmette.runtime.testing import history_engine
from tests.end_to_end.load import WatchedEngine, hashed
from tests.runtime.tokenization import tiny

Case = dict[str, Any]

LINES = (Path(__file__).parent / "data" / "field_cases.jsonl").read_text().splitlines()
CASES: dict[str, Case] = {case["id"]: case for case in map(json.loads, LINES)}
TESTS: dict[str, Callable[[Case], None]] = {}

END_OF_TURN = 258  # of the engines' byte tokenizer


def case(case_id: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """The decorated function tests the case of that id."""

    def register(test: Callable[[Case], None]) -> Callable[[Case], None]:
        assert case_id not in TESTS
        TESTS[case_id] = test
        return test

    return register


@pytest.mark.parametrize("case_id", CASES)
def test_the_fault_does_not_occur_here(case_id: str) -> None:
    assert case_id in TESTS, f"the case {case_id} has no test: {CASES[case_id]['title']}"
    TESTS[case_id](CASES[case_id])


def test_every_test_has_its_case() -> None:
    assert len(CASES) == len(LINES) == 23
    assert set(TESTS) <= set(CASES)
    assert {each["kind"] for each in CASES.values()} == {"program", "select"}


# -- Tokens --------------------------------------------------------------------------------------


def check_masks(case: Case) -> None:
    """Every mask that the case lists is the grammar's."""
    given = case["input"]
    tokens = [bytes.fromhex(value) for _, value in sorted(given["vocab_hex"].items())]
    vocabulary = Vocabulary([*tokens, b""], given["stop_ids"])
    compiler = GrammarCompiler(vocabulary)
    if "regex" in given:
        grammar = compiler.compile_regex(given["regex"])
    else:
        grammar = compiler.compile_json_schema(given["json_schema"])
    assert given["mask"]
    for path, wanted in given["mask"].items():
        matcher = grammar.matcher()
        for token_id in map(int, filter(None, path.split(","))):
            assert matcher.accept(token_id)
        assert allowed(matcher, vocabulary) == wanted, path


@case("c01")
def masks_are_computed_on_bytes(case: Case) -> None:
    check_masks(case)


@case("c06")
def the_space_mark_is_a_space(case: Case) -> None:
    check_masks(case)
    # The same vocabulary, as a tokenizer has it: its pieces stand for those bytes.
    pieces = case["input"]["pieces"]
    words = tuple(piece for piece in pieces.values() if len(piece) > 1 and piece[0] != "<")
    tokenizer = tiny.loaded(tiny.sentencepiece(words=words))
    token_bytes = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    spelled = {bytes.fromhex(value) for value in case["input"]["vocab_hex"].values()}
    assert spelled <= set(token_bytes)
    # Whatever is drawn, the text is the one there is, with its space, and gains none.
    engine, _ = history_engine(lambda history: {}, tokenizer=tokenizer)
    with AsyncEngine.over(lambda: engine) as backend:

        @pm.function
        def program(s: pm.State) -> None:
            s += "A:"
            s += pm.gen("words", regex=case["input"]["regex"])

        for seed in range(20):
            state = program.run(backend=backend, seed=seed, temperature=1)
            assert state["words"] == "cat dog"
            assert state.text() == "A:cat dog"


@case("c07")
def text_in_pieces_gains_no_space(case: Case) -> None:
    for dummy_prefix in ("normalizer", "metaspace"):
        tokenizer = tiny.loaded(tiny.sentencepiece(dummy_prefix=dummy_prefix))
        engine, _ = history_engine(lambda history: {}, tokenizer=tokenizer)

        @pm.function
        def program(s: pm.State) -> None:
            s += "A:"
            s += "B"
            s += pm.special("<turn>")
            s += "text"

        with AsyncEngine.over(lambda engine=engine: engine) as backend:
            token_ids = program.run(backend=backend).token_ids()
        begun = len(tokenizer.prefix_ids)
        assert token_ids[:begun] == tokenizer.prefix_ids
        (turn,) = [i for i in token_ids[begun:] if i in tokenizer.special_token_ids]
        at = token_ids.index(turn)
        assert tokenizer.decode([i for i in token_ids[begun:] if i != turn]) == "A:Btext"
        assert tokenizer.token_bytes(token_ids[at + 1]) == b"t"
        assert list(token_ids[begun:at]) == tokenizer.encode("A:B")
        assert list(token_ids[at + 1 :]) == tokenizer.encode("text")


class Walk:
    """A constrained text, drawn from fixed weights in every possible way."""

    def __init__(self, compiler: ConstraintCompiler, pattern: str) -> None:
        self._compiled = compiler.compile(Constraint.regex(pattern))

    def after(self, drawn: tuple[int, ...], **options: bool) -> tuple[list[int], list[int] | None]:
        """All tokens when these were drawn, and those that may come next; None at the end."""
        text = self._compiled.text(**options)
        step = text.begin(50)
        tokens = list(step.token_ids)
        for token_id in drawn:
            step = text.draw(token_id, 50)
            tokens[step.num_kept :] = step.token_ids
        return tokens, None if step.mask is None else [int(i) for i in step.mask.nonzero()[0]]

    def distribution(self, **options: bool) -> dict[tuple[int, ...], float]:
        """The probability of each list of tokens."""
        found: dict[tuple[int, ...], float] = {}
        waiting: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while waiting:
            drawn, probability = waiting.pop()
            tokens, following = self.after(drawn, **options)
            if following is None:
                found[tuple(tokens)] = found.get(tuple(tokens), 0.0) + probability
                continue
            weights = {token_id: 1.0 + token_id for token_id in following}
            total = sum(weights.values())
            waiting += [((*drawn, i), probability * each / total) for i, each in weights.items()]
        return found


@case("c09")
def a_forced_token_that_may_still_grow_is_held_back(case: Case) -> None:
    words = [token.encode() for token in case["input"]["vocab"]]
    token_bytes = [*words, b"0", b"}", b""]
    stop = len(token_bytes) - 1

    def encode(text: str) -> list[int]:
        """The longest token first."""
        raw, ids = text.encode(), []
        while raw:
            fitting = [each for each in token_bytes[:stop] if raw.startswith(each)]
            ids.append(token_bytes.index(max(fitting, key=len)))
            raw = raw[len(token_bytes[ids[-1]]) :]
        return ids

    compiler = ConstraintCompiler(token_bytes, {stop}, len(token_bytes), encode)
    forced = case["input"]["grammar_forces_bytes"]
    assert forced == '{"name":'
    # Behind the forced bytes a space, a quote or a digit may follow.
    pattern = r'\{"name":( ?"n{1,2}"| ?0)\}'
    walk = Walk(compiler, pattern)
    first = token_bytes.index(b'{"')
    assert walk.after(()) == ([], [first])
    committed, following = walk.after((first,), canonical=True)
    assert [token_bytes[i] for i in committed] == [b'{"', b"name"]
    assert {b'":', b'": ', b'": "'} <= {token_bytes[i] for i in following or []}

    def texts(**options: bool) -> dict[bytes, float]:
        found: dict[bytes, float] = {}
        for tokens, probability in walk.distribution(**options).items():
            text = b"".join(token_bytes[i] for i in tokens)
            found[text] = found.get(text, 0.0) + probability
        return found

    plain = texts(jumps=False)
    assert set(plain) == {
        b'{"name":' + space + value + b"}"
        for space, value in itertools.product((b"", b" "), (b'"n"', b'"nn"', b"0"))
    }
    assert sum(plain.values()) == pytest.approx(1)
    assert texts(jumps=True) == pytest.approx(plain)
    assert texts(canonical=True) == pytest.approx(plain)


@case("c10")
def an_escape_goes_on_over_a_token_border(case: Case) -> None:
    check_masks(case)


@case("c12")
def forced_tokens_leave_no_whitespace_trap(case: Case) -> None:
    given = case["input"]
    newline = ord("\n")
    # The newline before all others, then the smaller id before the greater one.
    preferred = {newline: 1000.0, **{i: 500.0 - i for i in range(257) if i != newline}}

    @pm.function
    def program(s: pm.State, **options: Any) -> None:
        schema, whitespace = given["json_schema"], given["whitespace"]
        s += "x" + pm.gen("call", json_schema=schema, whitespace=whitespace, **options)

    engine, _ = history_engine(lambda history: preferred, jump_forward=given["jump_forward"])
    with AsyncEngine.over(lambda: engine) as backend:
        for jump_forward in ("token", "canonical"):
            # As the case has it; and with room for more, so that not max_tokens ends it.
            for options in (
                {"max_tokens": given["max_tokens"]},
                {"max_tokens": 2000, "undeclared_properties": "forbidden"},
            ):
                state = program.run(
                    backend=backend, temperature=0, **options, jump_forward=jump_forward
                )
                meta = state.meta("call")
                assert meta["finish_reason"] == "stop"
                assert meta["forced_tokens"] > 0
                # A bound of 32 for each of some nine places.
                assert meta["completion_tokens"] < 400
                assert set(given["json_schema"]["required"]) <= set(json.loads(state["call"]))
                assert "\n" in state["call"]  # there was something to be trapped in


# -- Choices -------------------------------------------------------------------------------------

Probabilities = dict[str, dict[str | bytes | int, float]]


def choose(backend: ScriptedBackend, prompt: str, choices: list[str], **options: Any) -> pm.State:
    @pm.function
    def program(s: pm.State) -> None:
        s += prompt + pm.select("x", choices, **options)

    return program.run(backend=backend)


def likelihoods(state: pm.State) -> dict[str, float]:
    return {option: math.exp(v) for option, v in state.meta("x")["log_likelihoods"].items()}


@case("d01")
def a_choice_that_begins_another_is_reachable(case: Case) -> None:
    stub, choices = case["input"]["stub"], case["input"]["choices"]
    probabilities: Probabilities = {
        "p": {"a": stub["P(a|prompt)"]},
        "pa": {"a": stub["P(a|a)"]},
        "paa": {"a": 1 - stub["P(end|aa)"]},
    }
    state = choose(ScriptedBackend(probabilities=probabilities), "p", choices)
    assert state["x"] == "a"
    assert likelihoods(state) == pytest.approx({"a": 0.63, "aa": 0.27})
    probabilities["pa"] = {"a": 0.8}
    assert choose(ScriptedBackend(probabilities=probabilities), "p", choices)["x"] == "aa"


@case("d03")
def only_tokens_of_the_choice_are_scored(case: Case) -> None:
    given = case["input"]
    cut: dict[str, list[str]] = given["tokenisation"]
    tokenizer = ByteTokenizer(sorted({token for tokens in cut.values() for token in tokens}))
    probabilities: Probabilities = {
        "Call >>>": {"all": 0.3, "get": 0.5},
        "get": {"_time": 0.9},
    }
    backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
    state = choose(backend, given["prompt"], given["choices"])
    [request] = backend.score_requests
    assert [tokenizer.decode([i]) for i in request.token_ids] == cut["prompt"]
    scored = [[tokenizer.decode([i]) for i in ids] for ids in request.continuations]
    for choice, tokens in zip(given["choices"], scored, strict=True):
        assert [*cut["prompt"], *tokens] == cut[f"prompt+{choice}"]
    found = state.meta("x")["token_logprobs"]
    assert {choice: len(values) for choice, values in found.items()} == {"all": 1, "get_time": 2}
    assert sum(found["all"]) == pytest.approx(math.log(0.3))
    assert sum(found["get_time"]) == pytest.approx(math.log(0.5) + math.log(0.9))


@case("d04")
def a_boundary_token_that_merges_is_scored_for_all(case: Case) -> None:
    given = case["input"]
    cut: dict[str, list[str]] = given["tokenisation"]
    tokenizer = ByteTokenizer(sorted({token for tokens in cut.values() for token in tokens}))
    for likelier, other in (given["choices"], given["choices"][::-1]):
        probabilities: Probabilities = {"x =": {f" {likelier}": 0.5, f" {other}": 0.2}}
        backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
        state = choose(backend, given["prompt"], given["choices"])
        [request] = backend.score_requests
        assert [tokenizer.decode([i]) for i in request.token_ids] == ["x", " ="]
        scored = [tokenizer.decode(ids) for ids in request.continuations]
        assert scored == [cut[f"prompt+{choice}"][-1] for choice in given["choices"]]
        assert state.text() == given["prompt"] + likelier
        assert tokenizer.decode(state.token_ids()) == state.text()


@case("d06")
def later_tokens_are_scored_behind_their_own(case: Case) -> None:
    stub = case["input"]["stub"]
    probabilities: Probabilities = {
        "?": {"Yes": stub["P(Yes)"], "No": stub["P(No)"]},
        "Yes": {"No": stub["P(No|Yes)"], "Yes": stub["P(Yes|Yes)"]},
        "No": {"Yes": stub["P(Yes|No)"], "No": stub["P(No|No)"]},
    }
    tokenizer = ByteTokenizer(["Yes", "No"])
    backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
    state = choose(backend, "?", case["input"]["choices"])
    assert state["x"] == "NoYes"
    assert likelihoods(state) == pytest.approx({"YesNo": 0.06, "NoYes": 0.32})


@case("d07")
def choices_are_literal_text_in_every_grammar_backend(case: Case) -> None:
    choices = case["input"]["choices"]
    assert choices == case["accept"]
    for choice in choices:
        # The likeliest by its first letter, and taken as it is written.
        backend = ScriptedBackend(probabilities={"p": {choice[0]: 1.0}})
        state = choose(backend, "p", [choice, "~"])
        assert state["x"] == choice
        assert state.token_ids() == tuple(b"p" + choice.encode())
    vocabulary = byte_vocabulary()
    checked = []
    for name in BACKENDS:
        try:
            grammars = load_backend(name, vocabulary)
        except BackendNotInstalled:
            continue
        grammar = grammars.compile("choices", json.dumps(choices), {})
        for text in [*case["accept"], *case["reject"]]:
            matcher = grammar.matcher()
            taken = all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete
            assert taken == (text in case["accept"]), (name, text)
        checked.append(name)
    assert "palmette" in checked


@case("d09")
def the_first_of_equal_choices_wins(case: Case) -> None:
    given = case["input"]
    with pytest.raises(ValueError, match="'left' twice"):
        pm.select("x", given["choices"])
    distinct = ["left", "rite"]  # as many tokens, so that they are as likely

    @pm.function
    def program(s: pm.State, i: int) -> None:
        s += "p" + pm.select("x", distinct)

    for size in given["batch_sizes"]:
        states = program.run_batch(
            list(range(given["repeat"])), num_threads=size, backend=ScriptedBackend()
        )
        assert [state["x"] for state in states] == ["left"] * given["repeat"]


@case("d10")
def choices_of_byte_tokens_are_walked(case: Case) -> None:
    first, second = case["input"]["choices"]
    one, other = first.encode(), second.encode()
    assert one[:3] == other[:3]
    # Three tokens each, of which the first two are shared.
    tokenizer = ByteTokenizer([one[:2]])
    assert len(tokenizer.encode(first)) == len(tokenizer.encode(second)) == 3

    def probabilities(text: str) -> dict[str | bytes | int, float] | None:
        if not text.endswith("\ufffd"):
            return None
        return {one[2]: 1.0, one[3]: 0.2, other[3]: 0.6}

    backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
    state = choose(backend, "p", [first, second])
    assert state["x"] == second
    assert state.text() == "p" + second


@case("d12")
def token_walk_and_whole_score_are_two_rules(case: Case) -> None:
    stub, choices = case["input"]["stub"], case["input"]["choices"]
    tokenizer = ByteTokenizer(["sk", "ill", "cl", "oud"])
    probabilities: Probabilities = {
        "p": {"sk": stub["P(sk|prompt)"], "cl": stub["P(cl|prompt)"]},
        "sk": {"ill": stub["P(ill|sk)"]},
        "cl": {"oud": stub["P(oud|cl)"]},
    }
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
    for method, wanted in (("greedy_token_selection", "skill"), ("probability", "cloud")):
        backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
        state = choose(backend, "p", choices, choices_method=method)
        assert state["x"] == wanted
        assert state.meta("x")["method"] == method
        assert set(state.meta("x")["scores"]) == set(choices)
        assert likelihoods(state) == pytest.approx({"skill": 0.007, "cloud": 0.18})
        assert f"`{method}`" in page


@case("d13")
def degenerate_choices_are_settled_where_they_are_said(case: Case) -> None:
    empty, single, with_empty, with_number = (call["choices"] for call in case["input"]["calls"])
    with pytest.raises(ValueError, match="choices must not be empty"):
        pm.select("x", empty)
    backend = ScriptedBackend()
    assert choose(backend, "p", single)["x"] == "only"
    assert backend.score_requests == []
    with pytest.raises(ValueError, match="an empty choice"):
        pm.select("x", with_empty)
    with pytest.raises(TypeError, match="choices must be strings, got 3"):
        pm.select("x", with_number)


# -- Programs ------------------------------------------------------------------------------------


@case("e02")
def a_fork_copies_the_open_role(case: Case) -> None:
    @pm.function
    def program(s: pm.State) -> object:
        s += pm.user("Parent ")
        s += pm.assistant_begin()
        child = s.fork()[0]
        child += "Child"
        child += pm.assistant_end()
        return child.messages()

    assert program.run(backend=ScriptedBackend()).ret_value == [
        {"role": "user", "content": "Parent "},
        {"role": "assistant", "content": "Child"},
    ]


@case("e03")
def options_of_a_call_are_its_own(case: Case) -> None:
    backend = ScriptedBackend({"h=": "12\n", "d=": "-3\n", "": "free text\nand more"})

    @pm.function
    def program(s: pm.State) -> None:
        s += "h=" + pm.gen_int("h") + "\n"
        s += "d=" + pm.gen_int("d") + "\n"
        s += pm.gen("free", max_tokens=20)

    before = backend.default_sampling
    for _ in range(2):
        state = program.run(backend=backend)
        assert (state["h"], state["d"], state["free"]) == (12, -3, "free text\nand more")
    assert [request.sampling.stop for request in backend.requests] == [(" ", "\n")] * 2 + [()] + [
        (" ", "\n")
    ] * 2 + [()]
    assert backend.default_sampling == before == SamplingParams()


@case("e05")
def batches_come_in_order_or_as_they_end(case: Case) -> None:
    count = 32

    async def answer(prompt: str, request: Request) -> str:
        """The later, the smaller its number."""
        await asyncio.sleep((count - int(prompt)) * 0.0005)
        return f"<{prompt}>"

    @pm.function
    def program(s: pm.State, i: int) -> None:
        s += f"{i}"
        s += pm.gen("x")

    items = [{"i": i} for i in range(count)]
    wanted = [f"<{i}>" for i in range(count)]
    for num_threads in case["input"]["num_threads"]:
        backend = ScriptedBackend(answer)
        states = program.run_batch(items, num_threads=num_threads, backend=backend)
        assert [state["x"] for state in states] == wanted
        del states
        held: weakref.WeakSet[pm.State] = weakref.WeakSet()
        found: dict[int, str] = {}
        results: Iterator[Any] = program.run_batch_iter(
            items, num_threads=num_threads, backend=ScriptedBackend(answer)
        )
        for index, state in results:
            found[index] = state["x"]
            held.add(state)
            del state
            if len(found) in (16, 32):
                gc.collect()
                assert len(held) <= num_threads
        assert [found[index] for index in range(count)] == wanted

    taken = threading.Event()

    async def first_ends_last(prompt: str, request: Request) -> str:
        if prompt == "0":
            await asyncio.to_thread(taken.wait, 60)
        return "x"

    results = program.run_batch_iter(
        items, num_threads=64, backend=ScriptedBackend(first_ends_last)
    )
    assert next(results)[0] != 0  # delivered although the first item is not done
    taken.set()
    assert len(list(results)) == count - 1


@case("e06")
def appended_captures_collect_in_a_list(case: Case) -> None:
    own = ["1", "2"]

    @pm.function
    def program(s: pm.State) -> None:
        s += "p"
        s.set("xs", own)
        s += pm.gen(name="xs", regex="[0-9]", append=True)
        s += pm.gen(name="xs", regex="[0-9]", append=True)
        s += pm.gen(name="new", regex="[0-9]", append=True)
        s["word"] = "text"
        with pytest.raises(pm.ProgramError, match="'word' is one value, not a list"):
            s += pm.gen(name="word", append=True)

    state = program.run(backend=ScriptedBackend(["3", "4", "5"]))
    assert state["xs"] == ["1", "2", "3", "4"]
    assert state["new"] == ["5"]
    assert own == ["1", "2"]


@case("e08")
def text_after_a_stopped_generation(case: Case) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "List: " + pm.gen("x", stop=["\n"]) + "END"
        s += pm.gen("y", max_tokens=1)

    def check(state: pm.State) -> None:
        assert state["x"] == "a,b"
        assert state.text() == "List: a,bEND" + state["y"]
        assert tuple(state.text().encode()) == state.token_ids()

    scripted = ScriptedBackend([case["input"]["stub_output"], "z"])
    check(program.run(backend=scripted))
    assert scripted.prompts[1] == "List: a,bEND"

    seen: list[tuple[int, ...]] = []
    written = case["input"]["stub_output"].encode()

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        """Whatever it reads back from the pages decides; what it read is kept."""
        seen.append(history)
        start = len("List: ")
        step = len(history) - start
        is_first = bytes(history[start:]) == written[:step]
        return {written[step] if is_first and step < len(written) else ord("z"): 20.0}

    # In pages of several tokens, too, of which the stop leaves a part.
    for page_size in (1, 4, 16):
        seen.clear()
        with WatchedEngine.watching(
            lambda size=page_size: history_engine(logits_of, page_size=size)[0]
        ) as engine:
            state = program.run(backend=engine, temperature=0)
        check(state)
        assert state["y"] == "z"
        assert bytes(seen[-1]) == b"List: a,bEND"


@case("e09")
def streams_and_async_readers_give_the_same_text(case: Case) -> None:
    def stub() -> ScriptedBackend:
        return ScriptedBackend(["12345678", "abcd"], delay=0.005)

    @pm.function
    def program(s: pm.State) -> None:
        s += "A" + pm.gen("x", max_tokens=8) + "B" + pm.gen("y", max_tokens=8)

    state = program.stream(backend=stub())
    y = "".join(state.text_iter("y"))
    whole = "".join(state.text_iter())
    assert whole == state.text() == "A12345678Babcd"
    assert y == state["y"] == "abcd"
    assert "".join(state.text_iter()) == whole

    async def read() -> tuple[str, int]:
        """What an async reader gets, and how often the loop ran meanwhile."""
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        stream = program.stream_async(backend=stub())
        text = "".join([chunk async for chunk in stream.text_async_iter()])
        late = "".join([chunk async for chunk in stream.text_async_iter()])
        ticking.cancel()
        assert late == text
        return text, ticks

    text, ticks = asyncio.run(read())
    assert text == whole
    assert ticks > 5


@case("e11")
def a_fork_waits_for_what_its_parent_generates(case: Case) -> None:
    for width in case["input"]["variants"]:
        with WatchedEngine.watching(lambda: history_engine(hashed, page_size=4)[0]) as engine:

            @pm.function
            def program(s: pm.State) -> list[pm.State]:
                s += "P" + pm.gen("x", max_tokens=8)
                branches = s.fork(width)  # noqa: B023 - run in this round of the loop
                branches += "Q" + pm.gen("z", max_tokens=2)
                return list(branches)

            state = program.run(backend=engine, temperature=0, ignore_eos=True)
            for child in state.ret_value:
                assert child["x"] == state["x"]
                assert child.text() == "P" + state["x"] + "Q" + child["z"]
            # "P" and 7 letters of x; its last one and "Q" once; then "Q" again for the logits of
            # each further branch, and the first letter of every z.
            assert engine.stats().computed_tokens == (1 + 7) + 2 + (width - 1) + width


@case("e12")
def forks_share_their_prefix(case: Case) -> None:
    given = case["input"]
    shared, width = given["shared_prefix_tokens"], given["forks"]
    suffix, page_size = given["suffix_tokens"], 16

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" * shared
        branches = s.fork(width)
        branches += lambda i: f"{i}" * suffix + pm.gen("y", max_tokens=given["each_max_tokens"])
        branches.join()

    with WatchedEngine.watching(
        lambda: history_engine(hashed, page_size=page_size, num_pages=256)[0]
    ) as engine:
        state = program.run(backend=engine, temperature=0, ignore_eos=True)
    assert state.usage().prefilled_tokens <= shared + width * suffix + width * page_size
    cached = sorted(meta["cached_tokens"] for meta in state.meta("y"))
    assert cached[0] == 0
    assert all(count >= shared - page_size for count in cached[1:])
