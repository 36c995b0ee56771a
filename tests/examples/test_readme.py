"""What the README shows runs, and what it says came out comes out."""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import palmette as pm
from tests.examples.conftest import LoadExample
from tests.grammar import test_hf
from tests.runtime.server.harness import live

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment on the line before it."""

    note: str
    language: str
    text: str
    line: int


def blocks(language: str) -> list[Block]:
    pattern = re.compile(
        r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    return [
        Block(match[1] or "", match[2], match[3], README[: match.start()].count("\n") + 1)
        for match in pattern.finditer(README)
        if match[2] == language
    ]


def the_block(note: str) -> Block:
    (found,) = (
        block for language in ("python", "text") for block in blocks(language) if block.note == note
    )
    return found


PROGRAM = "the program of examples/quickstart.py"
OUTPUT = "the output of examples/quickstart.py"
SERVER = "needs the server"
TRANSFORMERS = "with a tokenizer and a model of transformers"


def run_block(block: Block, **names: object) -> None:
    code = compile(block.text, f"README.md, line {block.line}", "exec", dont_inherit=True)
    exec(code, {"__name__": "readme", **names})


def test_every_python_block_is_run_by_a_test() -> None:
    notes = [block.note for block in blocks("python")]
    assert set(notes) <= {"", PROGRAM, SERVER, TRANSFORMERS}
    assert "" in notes
    assert blocks("pycon")


@pytest.mark.parametrize(
    "block", [b for b in blocks("python") if not b.note], ids=lambda b: f"line-{b.line}"
)
def test_a_block_that_needs_no_model_runs(block: Block) -> None:
    run_block(block)


def test_the_sessions_of_the_stand_alone_libraries_print_what_they_show() -> None:
    source = "\n".join(block.text for block in blocks("pycon"))
    session = doctest.DocTestParser().get_doctest(source, {}, "README.md", "README.md", 0)
    results = doctest.DocTestRunner().run(session)
    assert results.failed == 0
    assert results.attempted > 15


def test_transformers_writes_what_the_grammar_allows(capsys: pytest.CaptureFixture[str]) -> None:
    run_block(the_block(TRANSFORMERS), tokenizer=test_hf.tokenizer(), model=test_hf.model())
    assert capsys.readouterr().out in ('"yes"\n', '"no"\n', '"maybe"\n')


def test_the_first_program_runs_and_is_the_quickstart(
    engine: pm.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pm, "Engine", lambda model: {"smollm2-135m": engine}[model])
    before = pm.get_default_backend()
    try:
        run_block(the_block(PROGRAM))
    finally:
        pm.set_default_backend(before)
    assert capsys.readouterr().out.startswith("billing subject=")
    program = the_block(PROGRAM).text
    shown = program[program.index("class Record") : program.index("pm.set_default_backend")]
    assert shown.strip() in (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")


def test_the_output_shown_is_that_of_the_quickstart(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for words, which depend on the processor's arithmetic, and for times."""
    load_example("quickstart").run(engine, "My invoice is wrong.")
    printed = capsys.readouterr().out.splitlines()
    shown = the_block(OUTPUT).text.splitlines()
    assert [line[:8] for line in shown] == [line[:8] for line in printed]
    assert shown[:2] == printed[:2] or shown[1].split()[:2] == printed[1].split()[:2]
    for name in ("team", "record"):
        row = next(line for line in shown if line.startswith(f"│ {name} "))
        again = next(line for line in printed if line.startswith(f"│ {name} "))
        assert row.split("│")[2:4] == again.split("│")[2:4]  # prefilled and cached


def test_the_openai_client_gets_the_answer_that_the_server_section_asks_for(
    engine: pm.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    block = the_block(SERVER)
    assert "http://127.0.0.1:8000" in block.text
    with live(engine, model_name="smollm2-135m") as url:
        text = block.text.replace("http://127.0.0.1:8000", url)
        run_block(Block(block.note, block.language, text, block.line))
    assert re.fullmatch(r'\{"city":"(Paris|Rome)","sure":(true|false)\}\n', capsys.readouterr().out)


def test_every_file_the_readme_points_to_is_there() -> None:
    targets = set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
