"""`palmette run`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from palmette.cli import main

PROGRAM = """
import palmette as pm

pm.set_default_backend(pm.ScriptedBackend({"name: ": "Ada", "age: ": "36", "ok? ": "yes"}))

@pm.function
def card(s, title, tags=()):
    s += f"{title}{list(tags)} name: " + pm.gen("name", stop="\\n")
    s += " age: " + pm.gen("age", regex="[0-9]+")
    branches = s.fork(2)
    branches += " ok? " + pm.gen("ok")
    branches.join()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    return write(tmp_path, PROGRAM)


def write(folder: Path, source: str) -> str:
    path = folder / f"program_{folder.name.replace('-', '_')}.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return str(path)


def test_the_text_goes_to_standard_output_and_the_figures_to_standard_error(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", f"{program}:card", "--arg", "title=A=B", "--arg", 'tags:=["x"]']) == 0
    out, err = capsys.readouterr()
    assert out == "A=B['x'] name: Ada age: 36\n"
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in err.splitlines()]
    found = {row[0]: row[1:5] for row in rows if len(row) == 6}
    assert found["primitive"] == ["prefilled", "cached", "forced", "decoded"]
    assert found["name"] == ["15", "0", "0", "4"]
    assert list(found) == ["primitive", "name", "age", "ok[0]", "ok[1]", "all"]
    total = [int(number) for number in found["all"]]
    assert total[3] == 4 + 3 + 4 + 4


def test_the_only_program_of_a_file_needs_no_name(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", program, "--arg", "title=T", "--no-figures"]) == 0
    assert capsys.readouterr() == ("T[] name: Ada age: 36\n", "")


REFUSALS = [
    (["{file}:other"], "has no program named 'other'; its programs: card"),
    (["{file}"], "card needs --arg for title; it takes: title, tags"),
    (["{file}", "--arg", "title=x", "--arg", "size=1"], "no argument named 'size'"),
    (["{file}", "--arg", "title"], "--arg takes NAME=TEXT or NAME:=JSON, got 'title'"),
    (["{file}", "--arg", "title:={"], "--arg title is not JSON"),
    (["{file}", "--arg", "title=x", "--page-size", "8"], "page_size: engine options need --model"),
    (["{file}", "--arg", "title=x", "--temperature", "-1"], "temperature must be at least 0"),
    (["{file}", "--arg", "title=x", "--model", "nope"], "no model named 'nope'"),
    (["nowhere.py:card"], "there is no file nowhere.py"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSALS)
def test_what_cannot_be_run_is_one_sentence(
    arguments: list[str], words: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *(argument.replace("{file}", program) for argument in arguments)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("palmette: ")
    assert error.count("\n") == 1


def test_a_file_of_several_programs_needs_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import palmette as pm\n" + "".join(
        f"@pm.function\ndef {name}(s): s += '{name}'\n" for name in ("one", "two")
    )
    assert main(["run", write(tmp_path, source)]) == 1
    assert "its programs: one, two" in capsys.readouterr().err


def test_a_program_without_a_backend_is_told_how_to_get_one(tmp_path: Path) -> None:
    source = "import palmette as pm\n@pm.function\ndef p(s): s += pm.gen('x')\n"
    done = run_process(write(tmp_path, source))
    assert done.returncode == 1
    assert done.stderr.startswith("palmette: no backend")
    assert done.stderr.count("\n") == 1


def test_a_primitive_that_fails_ends_the_program_with_one_sentence(tmp_path: Path) -> None:
    source = """
    import palmette as pm
    pm.set_default_backend(pm.ScriptedBackend([]))
    @pm.function
    def p(s):
        s += "before" + pm.gen("x")
    """
    done = run_process(write(tmp_path, source))
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert "no output for a prompt" in done.stderr
    assert done.stderr.startswith("palmette: ")


def test_an_interrupt_aborts_the_program_with_status_130(tmp_path: Path) -> None:
    source = """
    import palmette as pm
    pm.set_default_backend(pm.ScriptedBackend(pm.Reply(text="x" * 1000, token_delay=0.05)))
    @pm.function
    def p(s):
        s += "go " + pm.gen("x", max_tokens=1000)
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "palmette", "run", write(tmp_path, source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 3)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == b"\n"


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "palmette", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_program_runs_on_the_real_model(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
    import palmette as pm
    @pm.function
    def p(s, country):
        s += pm.user(f"What is the capital of {country}?")
        s += pm.assistant(pm.gen("capital", max_tokens=16))
    """
    file = write(tmp_path, source)
    options = ["--model", "smollm2-135m", "--temperature", "0", "--num-pages", "64"]
    assert main(["run", file, "--arg", "country=France", *options]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert "capital" in err
