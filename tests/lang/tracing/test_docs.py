"""What `docs/tracing.md` says is so."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import palmette as pm
from palmette.lang.tracing import model, recording
from palmette.lang.tracing.recording import Status
from palmette.lang.tracing.trace import Trace

PAGE = (Path(__file__).parents[3] / "docs" / "tracing.md").read_text(encoding="utf-8")


def test_the_programs_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/tracing.md", "exec"), names)
    assert pm.Trace.load("run.json") == names["trace"]


def test_every_field_and_status_is_on_the_page() -> None:
    kinds = [each for each in vars(model).values() if isinstance(each, type) and is_dataclass(each)]
    assert len(kinds) > 8
    told = {field.name for kind in (*kinds, Trace) for field in fields(kind)}
    told |= {status.value for status in Status}
    assert (
        sorted(name for name in told if f"`{name}`" not in PAGE and f"`{name}," not in PAGE) == []
    )


def test_the_bounds_on_the_page_are_those_in_the_code() -> None:
    assert f"{recording.MAX_EVENTS:,} primitives are kept" in PAGE
    assert f"above\n{model.MAX_TEXT:,} characters" in PAGE or f"{model.MAX_TEXT:,} char" in PAGE
    assert f"Beyond {model.MAX_NODES:,} nodes" in PAGE
    assert f"the {recording.NUM_TOP} likeliest" in PAGE
