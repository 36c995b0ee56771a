"""Every example runs as a command, on the model it names."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

import palmette as pm
from tests.examples.conftest import EXAMPLES, LoadExample

# What is asked of each, and the beginning of a line that it prints.
COMMANDS = {
    "quickstart": ([], "Ticket:  My invoice is wrong."),
    "react_agent": (["How much is tea?"], "Question: How much is tea?"),
    "rag": (["How warm is the pool?"], "Retrieved: baths"),
    "few_shot_eval": (["--limit", "6"], "│ all "),
    "json_extract": (["--count", "2"], "0 of 2 records are not valid."),
    "tree_of_thought": (["3", "8", "--width", "1"], "Numbers: 3 8"),
}


def test_every_example_is_here() -> None:
    assert set(COMMANDS) == {path.stem for path in EXAMPLES.glob("[a-z]*.py")}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs_as_a_command(
    engine: pm.Engine,
    load_example: LoadExample,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    models = []

    def open_engine(model: str) -> nullcontext[pm.Engine]:
        models.append(model)
        return nullcontext(engine)  # which stays open for the next example

    monkeypatch.setattr(pm, "Engine", open_engine)
    arguments, expected = COMMANDS[name]
    if name == "few_shot_eval":
        arguments = [*arguments, "--output", str(tmp_path)]
    assert not load_example(name).main(arguments)
    assert models == ["smollm2-135m"]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(expected) for line in lines), lines


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_says_what_it_shows(
    load_example: LoadExample, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    example = load_example(name)
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join((example.__doc__ or "").split())[:60] in printed
    assert "--model" in printed
