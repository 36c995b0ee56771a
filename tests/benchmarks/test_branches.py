"""The benchmark of branches and programs, smaller, on a script and on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks.branches import Sizes, measure, report, scripted
from palmette.protocol import TokenBackend
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine

SIZES = Sizes(num_branches=150, num_programs=120, num_new=2)


def check(backend: TokenBackend) -> None:
    branches, plain, native = measure("small", backend, SIZES)
    assert branches.is_same
    assert plain.is_same
    assert native.is_same
    # Branches need no threads; plain programs hold one each, at most 96. How many come to run at
    # once depends on the machine, but not one after the other.
    assert min(figures.max_running for figures in (branches, plain, native)) > 1
    assert plain.max_running <= 96
    assert branches.watch.max_threads <= branches.watch.threads_before + 2
    assert plain.watch.max_threads <= plain.watch.threads_before + 96 + 1


def test_many_branches_and_programs_on_a_script_answer_as_in_turn() -> None:
    check(scripted())


def test_many_branches_and_programs_on_an_engine_answer_as_in_turn() -> None:
    with AsyncEngine.over(lambda: tiny_engine(num_pages=4000, page_size=4)) as engine:
        check(engine)
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_available_pages == stats.num_pages


def test_the_report_has_a_line_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("script", scripted(), Sizes(num_branches=3, num_programs=2, num_new=1))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "script, 3 branches",
        "script, 2 plain programs",
        "script, 2 async programs",
    ]
    assert all(line.endswith("answers equal") for line in lines)
