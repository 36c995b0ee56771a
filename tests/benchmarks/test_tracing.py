"""The benchmark of traces at its smallest: it runs and says what it found."""

from __future__ import annotations

import pytest

from benchmarks import tracing
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine


def test_a_long_trace_is_taken_written_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    tracing.export(100)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("102 primitives: taken in ")
    assert second.startswith("records in memory: ")
    num_bytes = int(second.split()[3])
    assert 0 < num_bytes < 2000  # bounded, whatever the prompts


def test_both_ways_are_timed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = tracing.Sizes(width=2, programs=2, new_tokens=2)
    with AsyncEngine.over(lambda: tiny_engine(num_pages=512)) as engine:
        assert tracing.compare("forks", sizes.fork, engine, rounds=1) > 0
        assert tracing.compare("batch", sizes.batch, engine, rounds=1) > 0
        assert 0 < tracing.share_of_recording("batch", sizes.batch, engine, rounds=1) < 1
    out = capsys.readouterr().out
    assert out.count("ratio") == 2
    assert out.count("recording") == 1
    assert "with trace=True" in out


def test_the_certainty_of_a_median_comes_from_the_order_alone() -> None:
    # Tabulated 95 % intervals of a median: the 6th of 21, the 2nd of 9; of 5 there is none.
    assert [tracing.sure_place(count) for count in (5, 9, 21, 42)] == [0, 1, 5, 14]
