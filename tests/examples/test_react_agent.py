"""examples/react_agent.py"""

from __future__ import annotations

import re

import pytest

import palmette as pm
from tests.examples.conftest import LoadExample


def test_the_agent_acts_through_its_tools_and_sees_what_they_say(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("react_agent")
    state = example.run(engine, "How much are 4 honeys?")
    printed = capsys.readouterr().out
    steps = re.findall(r"Thought:.*\nAction: (\w+)\[(.*)\](?:\nObservation: (.*))?", printed)
    assert 2 <= len(steps) <= example.MAX_STEPS
    for action, given, observed in steps:
        if action == example.FINISH:
            assert given == state.ret_value
            assert not observed
        else:
            assert re.fullmatch(example.TOOLS[action].input_pattern, given)
            assert observed == example.TOOLS[action].use(given)
    assert steps[0][:2] == ("price", "honey")
    assert "one honey costs 9" in printed
    assert printed.startswith("Question: How much are 4 honeys?\n")  # what it was shown is left out
    assert state.text() == example.SHOWN + printed[: printed.index("\nAnswer: ")]


def test_each_step_costs_what_is_new_in_it(engine: pm.Engine, load_example: LoadExample) -> None:
    example = load_example("react_agent")
    state = example.run(engine, "How much is bread?")
    usage = state.usage()
    length = len(state.token_ids())
    # Every token of the state is prefilled or decoded, and none of them twice; what ends a thought
    # or an input may be decoded and cut off again, or scored and not chosen.
    assert length - usage.completion_tokens <= usage.prefilled_tokens <= length
    assert usage.cached_tokens > 2 * usage.prefilled_tokens


def test_an_agent_that_never_finishes_is_stopped(load_example: LoadExample) -> None:
    example = load_example("react_agent")
    replies = [" I need the price.", "tea]"] * example.MAX_STEPS
    backend = pm.ScriptedBackend(replies)  # all tokens equally likely, so the shortest action wins
    state = example.agent.run("How much is everything?", backend=backend)
    assert state.ret_value is None
    assert state.text().count("one tea costs 6") == example.MAX_STEPS + 1


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 * 6", "3 * 6 = 18"),
        ("1 + 2 * 3 - 4", "1 + 2 * 3 - 4 = 3"),
        ("7 / 2", "7 / 2 = 3.5"),
        ("1 / 0", "1 / 0 cannot be calculated: "),
        ("007 + 1", "007 + 1 cannot be calculated: "),
        ("2 ** 9", "2 ** 9 cannot be calculated: only numbers and + - * / are allowed"),
        ("__import__('os')", "__import__('os') cannot be calculated: only numbers"),
        ("'a' * 9", "'a' * 9 cannot be calculated: only numbers"),
    ],
)
def test_the_calculator_does_arithmetic_and_nothing_else(
    load_example: LoadExample, expression: str, result: str
) -> None:
    assert load_example("react_agent").calculate(expression).startswith(result)
