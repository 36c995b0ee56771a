"""Outlines: the shape of a program without a model, and where it is no longer known."""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings

import palmette as pm
from palmette.errors import ProgramError
from palmette.lang.backends.scripted import ByteTokenizer
from palmette.lang.planning.outline import (
    Appends,
    Cancels,
    Forks,
    Generates,
    Joins,
    Outline,
    Runs,
    Selects,
    Step,
)
from tests.lang.test_accounting import PROGRAMS, TOKENS, execute


def shape(steps: tuple[Step, ...]) -> list[Any]:
    """Texts and what is asked; a fork is the list of its branches."""
    found: list[Any] = []
    for step in steps:
        if isinstance(step, Forks):
            found.append([shape(branch) for branch in step.branches])
        elif isinstance(step, Runs):
            found.append((step.name, shape(step.steps)))
        elif isinstance(step, Appends):
            found.append(step.text)
        elif isinstance(step, Generates):
            found.append(f"gen {step.name}")
        elif isinstance(step, Selects):
            found.append(f"select {step.name}")
        elif isinstance(step, Joins):
            found.append("join " + ",".join(step.names))
        else:
            found.append(step.describe())
    return found


def line(program: pm.Function, text: str) -> int:
    """The line of the program that has `text`."""
    lines, first = inspect.getsourcelines(program.func)
    return first + next(index for index, each in enumerate(lines) if text in each)


def ends_at(outline: Outline, program: pm.Function, text: str) -> bool:
    assert not outline.is_complete
    return outline.where == f"{program.func.__code__.co_filename}:{line(program, text)}"


@pm.function
def few_shot(s: pm.State, question: str) -> None:
    s += "Q: What is the capital of France?\nA: Paris\n"
    s += "Q: " + question + "\nA:" + pm.gen("answer", stop="\n")


def test_a_few_shot_program_is_traced_as_in_sglang() -> None:
    outline = few_shot.trace()
    assert shape(outline.steps) == [
        "Q: What is the capital of France?\nA: Paris\n",
        "Q: ⟨question⟩\nA:",
        "gen answer",
    ]
    assert outline.is_complete
    assert outline.where is outline.why is None
    assert outline.prefix_text == "Q: What is the capital of France?\nA: Paris\nQ: "
    assert outline.prefix_ids is None
    assert [each.where for each in outline.depends_on("question")] == [
        f"{__file__}:{line(few_shot, '+ question')}"
    ]
    assert outline.variables == {"answer": "text"}


def test_nothing_is_asked_of_the_backend_and_known_prompts_have_their_ids() -> None:
    backend = pm.ScriptedBackend("ok")
    outline = few_shot.trace(backend=backend, question="Who?")
    (asked,) = outline.requests
    few_shot.run("Who?", backend=backend)
    assert asked.prompt_ids == backend.requests[0].token_ids
    assert len(backend.requests) == 1
    assert outline.prefix_ids == asked.prompt_ids
    assert few_shot.trace(backend=backend).prefix_ids == few_shot.constant_prefix(backend=backend)


def test_roles_belong_to_the_prefix_and_stand_in_the_outline() -> None:
    @pm.function
    def program(s: pm.State, ticket: str) -> None:
        s += pm.system("Sort.") + pm.user(ticket)
        with s.assistant():
            s += pm.select("team", ["a", "b"])

    outline = program.trace(backend=pm.ScriptedBackend("ok"))
    assert shape(outline.steps) == [
        *("message of system", "Sort.", "end of the message of system"),
        *("message of user", "⟨ticket⟩", "end of the message of user"),
        *("message of assistant", "select team", "end of the message of assistant"),
    ]
    assert outline.prefix_text == "<|im_start|>system\nSort.<|im_end|>\n<|im_start|>user\n"
    assert [step.role for step in outline.walk() if isinstance(step, Appends)] == [
        "system",
        "user",
    ]
    assert program.trace().prefix_text == "Sort."


def test_what_an_unknown_list_decides_is_said() -> None:
    @pm.function
    def program(s: pm.State, solved: list[str], text: str) -> None:
        s += "Solved: "
        for each in solved:
            s += each
        s += text + pm.gen("x")

    outline = program.trace(text="a")
    assert ends_at(outline, program, "for each in solved")
    assert outline.why == "what comes next depends on solved: how many items it has"
    assert program.trace(solved=["a", "b"]).is_complete


def test_forks_within_forks_and_both_joins() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "a"
        outer = s.fork(2)
        for index, branch in enumerate(outer):
            branch += f"b{index}" + pm.gen("x", max_tokens=2)
            inner = branch.fork(2)
            inner += pm.gen("y", max_tokens=3)
            inner.join()
        outer.join("concate_and_append")
        with s.copy() as copy:
            copy += "c" + pm.gen("z", dtype=int)
        s += "d"

    outline = program.trace()
    inner = [["gen y"], ["gen y"]]
    assert shape(outline.steps) == [
        "a",
        [["b0", "gen x", inner, "join y"], ["b1", "gen x", inner, "join y"]],
        "join ",
        [["c", "gen z"]],
        "join z",
        "d",
    ]
    assert outline.is_complete
    assert outline.variables == {"z": "list of 1: int"}


def test_an_async_program_has_an_outline_too() -> None:
    @pm.function
    async def program(s: pm.State, x: str) -> None:
        s += f"A{x}" + pm.gen("a")
        branches = s.fork(2)
        branches += pm.gen("b")
        await branches.join_async()
        first = (await s.value("b"))[0]
        s += first
        await s.ready()
        assert s.text()
        if first:
            s += "B"

    outline = program.trace()
    assert shape(outline.steps) == [
        *("A⟨x⟩", "gen a", [["gen b"], ["gen b"]], "join b", "⟨s['b']⟩"),
    ]
    assert ends_at(outline, program, "if first")


def test_an_async_program_that_waits_for_ever_ends_in_time() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "A" + pm.gen("a")
        await asyncio.sleep(30)

    outline = program.trace(max_seconds=0.05)
    assert not outline.is_complete
    assert outline.why is not None
    assert "took longer than 0.05 s" in outline.why


def test_programs_that_call_and_run_programs() -> None:
    @pm.function
    def part(s: pm.State, x: str) -> str:
        s += f"P{x}" + pm.gen("p")
        return "done"

    @pm.function
    def whole(s: pm.State) -> None:
        part(s, "here")
        state = part.run(s["p"])
        s += state["p"] + state.ret_value
        for each in part.run_batch(["1", "2"]):
            s += each.text()

    backend = pm.ScriptedBackend("ok")
    outline = whole.trace(backend=backend)
    assert outline.is_complete
    assert shape(outline.steps) == [
        *("Phere", "gen p", ("part", ["P⟨s['p']⟩", "gen p"]), "⟨s['p']⟩done"),
        *(("part", ["P1", "gen p"]), ("part", ["P2", "gen p"])),
        *("P1⟨s['p']⟩", "P2⟨s['p']⟩"),
    ]
    assert backend.requests == []
    with pytest.raises(pm.BackendNotSet):
        part.run("x")


def test_an_async_program_that_runs_programs_is_traced_as_well() -> None:
    @pm.function
    async def part(s: pm.State) -> None:
        s += "P" + pm.gen("p")

    @pm.function
    async def whole(s: pm.State) -> None:
        state = await part.run_async()
        s += state["p"]

    assert shape(whole.trace().steps) == [("part", ["P", "gen p"]), "⟨s['p']⟩"]


def test_variables_scopes_and_meta_data_are_stand_ins() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        with s.var_scope("v"):
            s += "A" + pm.gen("x", max_tokens=5, return_logprob=True)
        s["own"] = s["x"]
        s += s["v"].strip().upper() + s.raw("x") + s["own"]
        s += pm.gen_int("n") + pm.gen("many", n=2)
        s += f"{s['n'] + 1} {s['many'][1]} {s.meta('x')['finish_reason']} {s.get('no', 'none')}"
        s += str(s.usage().completion_tokens) + s.text()[:0]

    outline = program.trace()
    assert outline.is_complete, outline.why
    texts = [step.text for step in outline.steps if isinstance(step, Appends)]
    assert texts[1:] == [
        "⟨s['x']⟩⟨s['x']⟩⟨s['x']⟩",
        "⟨s['n']⟩ ⟨s['many']⟩ ⟨the finish_reason of s['x']⟩ none",
        "⟨the usage⟩",
    ]
    assert outline.variables["n"] == "int"
    assert outline.variables["many"] == "list of 2: text"


def read_branch(s: pm.State) -> None:
    if "yes" in s["x"]:
        s += "!"


def measured(s: pm.State) -> None:
    s += "#" * len(s["x"])


def as_key(s: pm.State) -> None:
    s += {"a": "b"}[s["x"]]


def matched(s: pm.State) -> None:
    if re.match("a", s["x"]):
        s += "!"


def loaded(s: pm.State) -> None:
    s += json.loads(s["x"])["text"]


def looped(s: pm.State) -> None:
    for word in s["x"].split():
        s += word


def typed(s: pm.State) -> None:
    if s.meta("x")["token_ids"]:
        s += "!"


def by_probability(s: pm.State) -> None:
    s += pm.select("y", ["a", "b"])
    if s.meta("y")["probabilities"]["a"] > 0.5:
        s += "!"


def by_usage(s: pm.State) -> None:
    if s.usage().decoded_tokens > 3:
        s += "!"


def by_ids(s: pm.State) -> None:
    if len(s.token_ids()) > 3:
        s += "!"


@pytest.mark.parametrize(
    "body",
    [
        *(read_branch, measured, as_key, matched, loaded, looped, typed, by_probability),
        *(by_usage, by_ids),
    ],
)
def test_what_goes_by_an_unknown_value_ends_the_outline_at_its_line(
    body: Callable[[pm.State], None],
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "A" + pm.gen("x")
        body(s)
        s += "behind"

    outline = program.trace()
    assert not outline.is_complete
    assert outline.where is not None
    assert "behind" not in shape(outline.steps)
    lines, first = inspect.getsourcelines(body)
    assert first < int(outline.where.rpartition(":")[2]) < first + len(lines)


def test_a_handler_of_errors_does_not_hide_that_a_value_was_needed() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.gen("x")
        try:
            found = re.search("[0-9]+", s["x"])
        except Exception:
            found = None
        s += "A" if found is None else "B"
        s += pm.gen("y" if found is None else "z")

    outline = program.trace()
    assert not outline.is_complete
    assert outline.why == "what comes next depends on a value in a way unseen"
    assert shape(outline.steps)[0] == "gen x"


def test_text_that_differs_from_run_to_run_is_no_part_of_what_is_known() -> None:
    numbers = itertools.count(10)

    @pm.function
    def program(s: pm.State) -> None:
        s += f"Run {next(numbers)}. " + pm.gen("x")
        s += "Behind."

    outline = program.trace(backend=pm.ScriptedBackend("ok"))
    assert outline.is_complete
    assert outline.prefix_text == "Run 1"
    assert outline.varies_at == (f"{__file__}:{line(program, 'Run {next')}",)
    assert outline.requests[0].prompt_ids is None


def endless(s: pm.State) -> None:
    while True:
        s += "a" + pm.gen("x")


def deep(s: pm.State) -> None:
    while True:
        (s,) = s.fork(1)


def wide(s: pm.State) -> None:
    s.fork(10**9)


def recursive(s: pm.State) -> None:
    s += pm.gen("x")
    recursive(s)


def reading(s: pm.State) -> None:
    s += pm.gen("x")
    while True:
        s["x"].strip()


def swallowing(s: pm.State) -> None:
    s += pm.gen("x")
    while True:
        try:
            s += "a" if s["x"] else "b"
        except BaseException:  # noqa: BLE001, RUF100
            s += "c"


@pytest.mark.parametrize("body", [endless, deep, wide, recursive, reading, swallowing])
def test_what_never_ends_is_cut_off(body: Callable[[pm.State], None]) -> None:
    started = time.monotonic()
    outline = pm.function(body).trace(max_steps=3000)
    assert time.monotonic() - started < 10
    assert not outline.is_complete
    assert outline.why
    assert str(outline).count("\n") < 500
    outline.show(io.StringIO())


def test_time_is_bounded_as_well() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        while True:
            time.sleep(0.01)
            s += "a"

    outline = program.trace(max_seconds=0.1)
    assert outline.why == "it took longer than 0.1 s to trace"


def test_errors_are_raised_unless_they_may_come_of_a_stand_in() -> None:
    @pm.function
    def program(s: pm.State, x: str) -> None:
        s += pm.user(x)
        s += pm.user_end()

    with pytest.raises(ProgramError, match="no message is open"):
        program.trace(x="a")
    outline = program.trace()
    assert isinstance(outline.error, ProgramError)
    assert ends_at(outline, program, "user_end")


def test_first_k_takes_the_first_ones_and_says_so() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        drafts = s.fork(3, timeout=30)
        drafts += pm.gen("x")
        pm.first_k(drafts, 2)
        drafts.join()
        s += s["x"][1]

    outline = program.trace()
    assert outline.is_complete
    assert outline.variables == {"x": "list of 2: text"}
    assert any("first ones win" in note for note in outline.notes)
    assert sum(isinstance(step, Cancels) for step in outline.walk()) == 1


def test_a_stream_comes_in_one_piece_and_a_note_says_so() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.gen("x", max_tokens=3)
        for piece in s.text_iter("x"):
            s += f"[{piece}]"

    outline = program.trace()
    assert shape(outline.steps) == ["gen x", "[⟨s['x']⟩]"]
    assert outline.notes == ("a text that is streamed is taken to come in one piece",)


@given(steps=PROGRAMS)
@settings(max_examples=60)
def test_random_programs_ask_what_their_outlines_say(steps: tuple[object, ...]) -> None:
    tokenizer = ByteTokenizer(TOKENS, prefix="<|bos|>")
    backend = pm.ScriptedBackend("q", tokenizer=tokenizer)

    @pm.function
    def program(s: pm.State) -> None:
        s += "p"
        execute(s, steps, [], waits=False)

    outline = program.trace(backend=backend)
    assert outline.is_complete
    program.run(backend=backend)
    prompts = [each.token_ids for each in backend.requests]
    prompts += [each.token_ids for each in backend.score_requests]
    said = [
        each for each in outline.requests if not isinstance(each, Selects) or len(each.choices) > 1
    ]
    assert len(said) == len(prompts)
    known = Counter(each.prompt_ids for each in said if each.prompt_ids is not None)
    assert known <= Counter(prompts)


def test_options_of_a_run_count() -> None:
    @pm.function
    def program(s: pm.State, choice: Literal["a", "b"] = "a") -> None:
        s += pm.gen("x") + pm.select("y", [choice])

    (gen, select) = program.trace(max_tokens=7, temperature=0).requests
    assert isinstance(gen, Generates)
    assert (gen.max_tokens, gen.is_bounded, gen.is_shareable) == (7, True, True)
    assert isinstance(select, Selects)
    (gen, _) = program.trace().requests
    assert isinstance(gen, Generates)
    assert (gen.max_tokens, gen.is_bounded, gen.is_shareable) == (128, False, False)
    with pytest.raises(TypeError, match="no parameter named 'z'"):
        program.trace(z=1)


def test_an_outline_can_be_looked_at() -> None:
    @pm.function
    def program(s: pm.State, x: str) -> None:
        s += pm.user(x)
        branches = s.fork(3)
        branches += "Note: " + pm.gen("note", max_tokens=7)
        if x:
            s += "!"

    outline = program.trace(backend=pm.ScriptedBackend("ok"))
    assert (
        str(outline)
        == f"""\
program: constant prefix of 6 tokens, 17 characters
  message of user  [test_outline.py:{line(program, "user(x)")}]
  text '⟨x⟩'  [test_outline.py:{line(program, "user(x)")}]
  end of the message of user  [test_outline.py:{line(program, "user(x)")}]
  fork(3)  [test_outline.py:{line(program, "fork(3)")}]
    branches 0 to 2, all alike
      text 'Note: '  [test_outline.py:{line(program, "Note")}]
      gen('note', max_tokens=7)  [test_outline.py:{line(program, "Note")}]
  not known from test_outline.py:{line(program, "if x")} on: \
what comes next depends on x: whether it is true"""
    )
    shown = io.StringIO()
    outline.show(shown)
    assert "└── gen('note', max_tokens=7)" in shown.getvalue()
    assert "not known from test_outline.py" in shown.getvalue()
