"""Outlines of the examples, which need no model."""

from __future__ import annotations

from palmette.lang.planning.outline import Forks
from tests.examples.conftest import LoadExample
from tests.lang.planning.test_outline import ends_at, shape


def test_the_quickstart_is_known_in_whole(load_example: LoadExample) -> None:
    quickstart = load_example("quickstart")
    outline = quickstart.triage.trace()
    assert outline.is_complete
    assert outline.fork_widths == [3]
    assert [step.describe() for step in outline.requests] == [
        "select('team', 3 choices)",
        "gen('record', Record, by json_schema, max_tokens=60)",
        *3 * ["gen('note', max_tokens=24)"],
    ]
    assert outline.variables == {"team": "choice", "record": "Record", "note": "list of 3: text"}


def test_an_agent_is_known_up_to_where_it_goes_by_its_action(load_example: LoadExample) -> None:
    react_agent = load_example("react_agent")
    outline = react_agent.agent.trace(question="How much?")
    assert ends_at(outline, react_agent.agent, "== FINISH")
    assert outline.why == "what comes next depends on s['action']: whether it is true"
    assert shape(outline.steps)[1:] == [
        *("Thought:", "gen thought", "\nAction: ", "select action", "["),
    ]


def test_a_tree_of_thought_is_known_up_to_where_thoughts_are_compared(
    load_example: LoadExample,
) -> None:
    tree_of_thought = load_example("tree_of_thought")
    outline = tree_of_thought.search.trace(numbers=[2, 5, 7], width=6, beam=4)
    assert ends_at(outline, tree_of_thought.search, 'branch["step"]: branch')
    assert outline.fork_widths == [6]
    (fork,) = (step for step in outline.steps if isinstance(step, Forks))
    assert shape(fork.branches[5]) == ["select step", " - ", "select verdict", "\n"]
    assert "branches 0 to 5, all alike" in str(outline)


def test_an_extraction_is_known_in_whole(load_example: LoadExample) -> None:
    outline = load_example("json_extract").extract.trace()
    assert outline.is_complete
    assert len(outline.depends_on("text")) == 1
