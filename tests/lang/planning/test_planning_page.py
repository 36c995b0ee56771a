"""What `docs/planning.md` shows is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


def test_the_programs_of_the_page_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 2
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, str(PAGE), "exec"), names)
        else:
            assert capsys.readouterr().out == block


def test_the_tests_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE.read_text()))
    assert named
    assert all((PAGE.parents[1] / name).exists() for name in named)
