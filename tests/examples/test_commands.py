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


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_ends_with_one_line_for_an_error_and_for_ctrl_c(
    load_example: LoadExample,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    where = ["--output", str(tmp_path)] if name == "few_shot_eval" else []

    def told() -> str:
        with pytest.raises(SystemExit, match=r"1|130"):
            load_example(name).main([*where, "--model", "nothing"])
        return capsys.readouterr().err

    assert "no model named 'nothing'" in told()

    def interrupted(model: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pm, "Engine", interrupted)
    assert told().strip().endswith("goes on" if name == "few_shot_eval" else "interrupted")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rag", ["--texts", "/nowhere"], "there are no .txt files with words in /nowhere"),
        ("json_extract", ["--count", "0"], "--count must be at least 1"),
        ("tree_of_thought", ["1"], "two numbers at least are needed"),
        ("tree_of_thought", ["1", "2", "--beam", "0"], "must be at least 1"),
        ("few_shot_eval", ["--limit", "-1"], "argument --limit: invalid count value"),
    ],
)
def test_what_cannot_be_meant_is_said_before_a_model_is_loaded(
    load_example: LoadExample,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(pm, "Engine", None)
    with pytest.raises(SystemExit, match=r"1|2"):
        load_example(name).main(arguments)
    assert message in capsys.readouterr().err
