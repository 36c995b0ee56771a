"""`palmette trace`."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

import palmette as pm
from palmette.cli import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Say: " + pm.gen("x")

    path = tmp_path / "run.json"
    program.run(backend=pm.ScriptedBackend("</script>ok")).trace().save(path)
    return path


def test_view_writes_the_page_and_opens_it(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    page = saved.with_name("page.html")
    assert main(["trace", "view", str(saved), "--output", str(page), "--no-browser"]) == 0
    assert opened == []
    assert page.read_text(encoding="utf-8") == pm.Trace.load(saved).html()
    assert main(["trace", "view", str(saved), "-o", str(page)]) == 0
    assert opened == [page.as_uri()]
    assert capsys.readouterr().out == f"{page}\n{page}\n"


def test_show_prints_the_tree(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", str(saved)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 run (1 ok), 1 branch, 2 primitives")
    assert "gen('x')" in out
    assert main(["trace", "show", str(saved), "--all"]) == 0
    assert "'Say: '" in capsys.readouterr().out


def test_export_writes_spans_without_texts_unless_asked(saved: Path) -> None:
    path = saved.with_name("spans.json")
    assert main(["trace", "export", str(saved), "--otlp", str(path)]) == 0
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told == pm.Trace.load(saved).to_otlp()
    assert main(["trace", "export", str(saved), "--otlp", str(path), "--contents"]) == 0
    assert "Say: " in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_file_that_is_no_trace_is_told_in_a_sentence(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["trace", "show", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("palmette: ")
    assert error.count("\n") == 1
