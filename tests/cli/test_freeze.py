"""`palmette freeze`, and `--thaw` of the commands that load a model."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import palmette.runtime
from palmette.cli import main
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine

PROGRAM = """
import palmette as pm

@pm.function
def card(s, title, name):
    s += f"{title} name: {name}"
    s += " age: " + pm.gen("age", max_tokens=2, ignore_eos=True)
"""


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AsyncEngine]]:
    """The engines that the commands make, all of them tiny."""
    made: list[AsyncEngine] = []

    def make(model: str, **options: Any) -> AsyncEngine:
        made.append(AsyncEngine.over(lambda: tiny_engine(seed=int(model), **options)))
        return made[-1]

    monkeypatch.setattr(palmette.runtime, "AsyncEngine", make, raising=False)
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / f"program_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def token_ids(path: Path) -> tuple[int, ...]:
    from palmette.runtime.kv.frozen import read_frozen

    return read_frozen(path, tiny_engine().identity).token_ids


def test_the_prefix_is_a_system_message_or_a_file_or_that_of_a_program(
    tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, path = tmp_path / "prompt.txt", tmp_path / "prefix"
    prompt.write_text("Once upon\n", encoding="utf-8")
    for given, expected in (
        (["--system", "Be brief."], (257, *b"system\nBe brief.", 258, 10)),
        (["--prompt", str(prompt)], (*b"Once upon\n",)),
        (["--program", program, "--arg", "title=T"], (*b"T name: ",)),
    ):
        assert main(["freeze", "0", *given, "-o", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: {len(expected)} tokens, 0.0 MB\n"
        assert token_ids(path) == expected


def test_a_program_runs_behind_what_was_thawed(
    tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "prefix")
    arguments = ["--model", "0", "--arg", "title=T", "--arg", "name=Ada", "--temperature", "0"]
    assert main(["run", program, *arguments]) == 0
    cold = capsys.readouterr().out
    assert main(["freeze", "0", "--program", program, "--arg", "title=T", "-o", path]) == 0
    capsys.readouterr()
    assert main(["run", program, *arguments, "--thaw", path]) == 0
    warm = capsys.readouterr()
    assert warm.out == cold
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in warm.err.splitlines()]
    (row,) = [row for row in cells if row and row[0] == "age"]
    assert row[1:3] == [str(len("Ada age: ")), str(len("T name: "))]


def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "prefix")
    assert main(["freeze", "0", "--system", "Be brief.", "-o", path]) == 0
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for arguments, words in (
        (["freeze", "0", "--prompt", "absent", "-o", path], "absent: cannot be read: No such file"),
        (["freeze", "0", "--prompt", str(tmp_path / "latin"), "-o", path], "is not UTF-8"),
        (["freeze", "0", "--system", "x", "--arg", "a=b", "-o", path], "--arg is for a --program"),
        (["freeze", "0", "--program", program, "-o", path], "card has no constant prefix"),
        (["freeze", "0", "--program", program, "--arg", "x=y", "-o", path], "no argument named"),
        (["freeze", "0", "--system", "x", "-o", f"{path}/x"], "cannot be written"),
        (["chat", "1", "--thaw", path], "was frozen with other weights"),
        (["chat", "0", "--thaw", "absent"], "absent: there is no such file"),
        (["run", program, "--thaw", path, "--arg", "title=", "--arg", "name="], "need --model"),
        (["serve", "1", "--port", "0", "--thaw", path], "no model named '1'"),
    ):
        capsys.readouterr()
        assert main(arguments) == 1, arguments
        error = capsys.readouterr().err
        assert error.startswith("palmette: ")
        assert words in error
        assert error.count("\n") == 1
    assert main(["freeze", "0", "-o", path]) == 2


def test_a_server_thaws_before_it_is_ready(
    tmp_path: Path, engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from palmette.runtime import async_engine

    module = importlib.import_module("palmette.runtime.server.serve")
    path = str(tmp_path / "prefix")
    assert main(["freeze", "0", "--system", "Be brief.", "-o", path]) == 0
    monkeypatch.setattr(async_engine, "AsyncEngine", palmette.runtime.AsyncEngine)
    held: list[int] = []

    def serve_backend(engine: AsyncEngine, *_: object, **__: object) -> None:
        held.append(engine.stats().num_pages - engine.stats().num_free_pages)

    monkeypatch.setattr(module, "serve_backend", serve_backend)
    said: list[str] = []
    module.serve("0", port=0, thaw=[path], say=said.append)
    gc.unfreeze()  # what the server did for a process of its own
    assert said[-1] == f"Thawed 19 tokens from {path}"
    assert held == [2]
