"""The programs in `docs/language.md` run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import palmette as pm

PAGE = Path(__file__).parents[2] / "docs" / "language.md"


def test_the_programs_of_the_page_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    # Through the dict, so that the real one, with torch, is not loaded to be put back.
    monkeypatch.setitem(vars(pm), "Engine", lambda name: pm.ScriptedBackend("ok"))
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        pm.set_default_backend(None)
    state = names["state"]
    assert isinstance(state, pm.State)
    assert state["note"] == ["ok", "ok"]
    assert capsys.readouterr().out.startswith("tokens 0 to ")


def test_every_test_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", PAGE.read_text()))
    assert named
    assert all((Path(__file__).parent / name).exists() for name in named)


def test_every_refused_option_is_on_the_page() -> None:
    from palmette.lang.options import _REFUSED

    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in _REFUSED)
