"""Plans: what a batch will cost is what it costs; order and advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.errors import InvalidRequest
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.lang.planning.advice import Advice
from palmette.lang.planning.plan import BatchPlan
from palmette.lang.planning.prediction import PrefixSet

TOKENS = ["ab", "abc", "bc", " a"]


@pm.function
def sorts(s: pm.State, first: str, second: str, kind: int) -> None:
    """Every prompt is known beforehand. What is written has none of the letters in prompts."""
    s += "Sort " + first + "|" + second
    if kind == 0:
        s += pm.gen("x", max_tokens=3)
    elif kind == 1:
        s += pm.select("y", ["yes", "yet", "no", first + "!"])
    elif kind == 2:
        branches = s.fork(3)
        branches += [f" {index % 2} " + pm.gen("x", max_tokens=2) for index in range(3)]
        branches.join()
    elif kind == 3:
        s += pm.gen("x", n=3, max_tokens=2)
    else:
        s += pm.gen("x", max_tokens=2, return_logprob=True, logprob_start_len=2)


WORDS = st.text(alphabet="abc ", min_size=1, max_size=5)
ITEMS = st.lists(st.tuples(WORDS, WORDS, st.integers(0, 4)), min_size=1, max_size=8)


@given(items=ITEMS, temperature=st.sampled_from([0, 1]), is_repeatable=st.booleans())
@settings(max_examples=60)
def test_what_is_predicted_is_what_is_computed(
    items: list[tuple[str, str, int]], temperature: int, is_repeatable: bool
) -> None:
    backend = ScriptedBackend("XYZ", tokenizer=ByteTokenizer(TOKENS), is_repeatable=is_repeatable)
    plan = sorts.plan(items, backend=backend, temperature=temperature)
    assert backend.requests == []
    predicted = plan.predicted
    assert predicted.is_exact
    states = sorts.run_batch(
        items, backend=backend, temperature=temperature, plan=plan, num_threads=1
    )
    assert sum(state.usage().prefilled_tokens for state in states) == predicted.prefilled_tokens
    assert sum(state.usage().prompt_tokens for state in states) == predicted.prompt_tokens
    num_asked = len(backend.requests) + len(backend.score_requests)
    assert num_asked == predicted.num_requests - predicted.num_shared
    plain = sorts.run_batch(
        items, backend=ScriptedBackend("XYZ", tokenizer=ByteTokenizer(TOKENS)), plan=False
    )
    assert [state.token_ids() for state in states] == [state.token_ids() for state in plain]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_a_set_of_prefixes_counts_as_a_set_does(lists: list[list[int]]) -> None:
    found, prefixes = PrefixSet(), set[tuple[int, ...]]()
    for ids in lists:
        here = {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
        assert found.add(ids) == len(here & prefixes)
        prefixes |= here
        assert found.num_tokens == len(prefixes)


@pm.function
def answers(s: pm.State, question: str, context: str) -> None:
    s += f"Question: {question}\nContext: {context}\nAnswer: " + pm.gen("a", max_tokens=4)


CONTEXTS = ["long text " * 20, "other text " * 20]
QUESTIONS = [
    {"question": f"{index} is what?", "context": CONTEXTS[index % 2]} for index in range(10)
]


def codes(plan: BatchPlan) -> list[str]:
    return [advice.code for advice in plan.advice]


def found(plan: BatchPlan, code: str) -> Advice:
    (advice,) = (each for each in plan.advice if each.code == code)
    return advice


def test_an_argument_that_varies_first_is_told_with_what_it_costs() -> None:
    backend = ScriptedBackend("ok")
    plan = answers.plan(QUESTIONS, backend=backend)
    advice = found(plan, "order-of-arguments")
    assert advice.share is not None
    assert "'question' has 10 values" in advice.message
    assert "in the order context, question" in advice.message
    assert advice.where == f"{__file__}:{answers.func.__code__.co_firstlineno + 2}"

    @pm.function
    def better(s: pm.State, question: str, context: str) -> None:
        s += f"Context: {context}\nQuestion: {question}\nAnswer: " + pm.gen("a", max_tokens=4)

    moved = better.plan(QUESTIONS, backend=backend)
    assert "order-of-arguments" not in codes(moved)
    before, after = (each.predicted.prefilled_tokens for each in (plan, moved))
    assert advice.share == pytest.approx((before - after) / before, abs=0.02)
    assert f"{advice.share:.0%} of the prefill" in advice.message


def test_the_order_is_depth_first_and_results_are_in_that_of_the_items() -> None:
    @pm.function
    def program(s: pm.State, context: str, question: str) -> None:
        s += context + question + pm.gen("a", max_tokens=4)

    backend = ScriptedBackend("ok")
    plan = program.plan(QUESTIONS, backend=backend)
    assert plan.order == (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)
    states = program.run_batch(QUESTIONS, backend=backend, plan=plan, num_threads=1)
    prompts = [QUESTIONS[index]["question"] for index in plan.order]
    assert [prompt.endswith(each) for prompt, each in zip(backend.prompts, prompts, strict=True)]
    for state, item in zip(states, QUESTIONS, strict=True):
        assert state.text() == item["context"] + item["question"] + "ok"
    assert dict(program.run_batch_iter(QUESTIONS, backend=backend, plan=plan)).keys() == set(
        range(10)
    )


async def test_an_async_batch_takes_a_plan_too() -> None:
    @pm.function
    async def program(s: pm.State, context: str, question: str) -> None:
        s += context + question + pm.gen("a", max_tokens=4)

    backend = ScriptedBackend("ok")
    plan = program.plan(QUESTIONS, backend=backend)
    assert plan.predicted.is_exact
    states = await program.run_batch_async(QUESTIONS, backend=backend, plan=plan, num_threads=2)
    assert [state.text() for state in states] == [
        item["context"] + item["question"] + "ok" for item in QUESTIONS
    ]


def test_a_plan_is_for_its_batch_alone() -> None:
    backend = ScriptedBackend("ok")
    plan = answers.plan(QUESTIONS, backend=backend)
    with pytest.raises(InvalidRequest, match="the plan is for 10 runs of answers, the batch has 9"):
        answers.run_batch(QUESTIONS[1:], backend=backend, plan=plan)
    with pytest.raises(InvalidRequest, match="runs of answers, the batch has 10 of sorts"):
        sorts.run_batch([("a", "b", 0)] * 10, backend=backend, plan=plan)
    with pytest.raises(ValueError, match="plan must be 'auto', False or a BatchPlan"):
        answers.run_batch(QUESTIONS, backend=backend, plan="on")  # type: ignore[call-overload]
    with pytest.raises(pm.UnsupportedFeature, match="plan with generator_style"):
        answers.run_batch(QUESTIONS, backend=backend, plan=plan, generator_style=True)
    with pytest.raises(TypeError, match="item 1 of the batch"):
        answers.plan([QUESTIONS[0], {"question": "x"}], backend=backend)


def test_equal_items_are_told_and_whether_they_cost_anything() -> None:
    items = [*QUESTIONS[:3], QUESTIONS[1]]
    backend = ScriptedBackend("ok", is_repeatable=True)
    greedy = answers.plan(items, backend=backend, temperature=0)
    assert found(greedy, "equal-items").message == "item 3 as others ask: they get the same answers"
    assert greedy.predicted.num_shared == 1
    drawn = answers.plan(items, backend=backend)
    assert "asked all the same" in found(drawn, "equal-items").message
    assert drawn.predicted.num_shared == 0


def advised(program: pm.Function, items: list[Mapping[str, Any]], **options: Any) -> list[str]:
    return codes(program.plan(items, backend=ScriptedBackend("ok", **options)))


def test_whitespace_length_and_bounds() -> None:
    @pm.function
    def program(s: pm.State, text: str) -> None:
        s += f"Text: {text}" + pm.gen("a")

    items: list[Mapping[str, Any]] = [{"text": "a b"}, {"text": "a  b"}, {"text": "c" * 50}]
    plan = program.plan(items, backend=ScriptedBackend("ok", max_context=40))
    assert {"whitespace", "prompt-too-long", "no-max-tokens"} <= set(codes(plan))
    assert "item 2, which will fail" in found(plan, "prompt-too-long").message
    assert "1 values of 'text'" in found(plan, "whitespace").message
    assert not advised(program.bind(), [{"text": "a"}, {"text": "b"}])[1:]


def test_what_differs_from_run_to_run_is_told_with_its_line() -> None:
    numbers = iter(range(10, 99))

    @pm.function
    def program(s: pm.State, text: str) -> None:
        s += "Now: "
        s += f"{next(numbers)} "
        s += text + pm.gen("a", max_tokens=3)

    plan = program.plan([{"text": "a"}, {"text": "b"}], backend=ScriptedBackend("ok"))
    advice = found(plan, "differs-between-runs")
    assert advice.where == f"{__file__}:{program.func.__code__.co_firstlineno + 3}"
    assert advice.share is not None
    assert 0 < advice.share < 1


def test_a_read_that_makes_branches_wait_for_each_other_is_told() -> None:
    @pm.function
    def serial(s: pm.State) -> None:
        branches = s.fork(3)
        for branch in branches:
            branch += pm.gen("x", max_tokens=3)
            s["seen"] = branch["x"]
        branches.join()

    @pm.function
    def parallel(s: pm.State) -> None:
        branches = s.fork(3)
        branches += pm.gen("x", max_tokens=3)
        s["seen"] = branches[0]["x"]
        branches.join()

    assert advised(serial, [{}]) == ["serial-branches"]
    assert advised(parallel, [{}]) == []


def test_forks_one_after_the_other_that_need_nothing_of_each_other_are_told() -> None:
    @pm.function
    def serial(s: pm.State) -> None:
        for angle in ("cost", "time"):
            branches = s.fork(1)
            branches += f"On {angle}:" + pm.gen("x", max_tokens=3)
            branches.join()

    @pm.function
    def chained(s: pm.State) -> None:
        for angle in ("cost", "time"):
            branches = s.fork(2)
            branches += f"On {angle}:" + pm.gen("x", max_tokens=3)
            branches.join()
            s += s["x"][0]

    assert advised(serial, [{}]) == ["join-in-a-loop"]
    assert advised(chained, [{}]) == []


def test_a_program_that_goes_by_its_answers_is_predicted_as_far_as_it_is_known() -> None:
    @pm.function
    def program(s: pm.State, x: str) -> None:
        s += x + pm.gen("a", max_tokens=3)
        s += "more" + pm.gen("b", max_tokens=3)
        if s["b"] == "x":
            s += pm.gen("c", max_tokens=3)

    plan = program.plan(["aa", "ab"], backend=ScriptedBackend("ok"))
    predicted = plan.predicted
    assert not predicted.is_exact
    assert (predicted.num_requests, predicted.num_unknown, predicted.num_open) == (4, 2, 2)
    assert (predicted.prompt_tokens, predicted.prefilled_tokens) == (4, 3)
    assert predicted.hit_rate == 0.25
    text = str(plan)
    assert text.startswith("program: 2 programs\n")
    assert "4 tokens of prompts, 3 to prefill, 25% cached (as far as prompts are known)" in text
    assert "2 programs may ask for more than is known" in text


def test_items_for_which_there_is_no_time_come_last_and_are_counted() -> None:
    plan = answers.plan(QUESTIONS, backend=ScriptedBackend("ok"), max_seconds=1e-9)
    assert plan.outlines == (None,) * 10
    assert plan.predicted.num_open == 10
    assert plan.order == tuple(range(10))


def test_an_empty_batch_has_a_plan() -> None:
    plan = answers.plan([], backend=ScriptedBackend("ok"))
    assert plan.order == ()
    assert answers.run_batch([], backend=ScriptedBackend("ok"), plan=plan) == []
