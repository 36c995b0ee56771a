"""A program's constant prefix, frozen by one engine and thawed by the next."""

from __future__ import annotations

from pathlib import Path

import pytest

import palmette as pm
from palmette.errors import ProgramError
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine


@pm.function
def triage(s: pm.State, ticket: str) -> None:
    s += pm.system("You sort the tickets of a telephone company by the team that can help.")
    s += pm.user("The line is dead.") + pm.assistant("network")
    s += pm.user(ticket)
    s += pm.assistant(pm.gen("team", max_tokens=8, temperature=0, ignore_eos=True))


@pm.function
def echo(s: pm.State, text: str) -> None:
    s += text
    s += pm.gen("answer", max_tokens=2)


def test_a_program_starts_warm_from_its_frozen_prefix_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "triage.safetensors"
    with AsyncEngine.over(tiny_engine) as engine:
        cold = triage.run(ticket="No tone.", backend=engine)
        expected = cold.token_ids()
    with AsyncEngine.over(tiny_engine) as engine:
        num_tokens = triage.freeze(path, backend=engine)
        assert num_tokens == len(triage.constant_prefix(backend=engine)) > 100
        assert engine.stats().computed_tokens == num_tokens
    with AsyncEngine.over(lambda: tiny_engine(page_size=7)) as engine:
        assert engine.thaw(path) == num_tokens
        warm = triage.run(ticket="No tone.", backend=engine)
        assert warm.token_ids() == expected
        assert warm.usage().cached_tokens == num_tokens


def test_a_program_without_a_constant_prefix_is_not_frozen(tmp_path: Path) -> None:
    path = tmp_path / "prefix"
    with AsyncEngine.over(tiny_engine) as engine:
        with pytest.raises(ProgramError, match="echo has no constant prefix"):
            echo.freeze(path, backend=engine)
        assert echo.freeze(path, backend=engine, text="Hello") == 5
        assert echo.bind(text="Good day").freeze(path, backend=engine) == 8
        assert engine.thaw(path) == 8
