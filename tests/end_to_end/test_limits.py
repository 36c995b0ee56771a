"""What limits, `first_k` and the cancelling of a branch stop, the engine frees within a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import palmette as pm
from palmette.runtime.engine import Engine
from tests.end_to_end.load import WatchedEngine, check_idle, make_engine
from tests.runtime.server.harness import wait_for

STEP_SECONDS = 0.003


def slow_engine() -> Engine:
    """Whatever runs for some tokens can be stopped in between."""
    engine = make_engine("tiny", num_pages=200)
    run = engine._worker.run

    def slowly(*args: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return run(*args)

    engine._worker.run = slowly  # type: ignore[method-assign]
    return engine


@pytest.fixture
def engine() -> Iterator[WatchedEngine]:
    with WatchedEngine.watching(slow_engine) as engine:
        yield engine


def check_freed(engine: WatchedEngine, num_given_up: int) -> None:
    """All that was stopped was aborted, with at most a step too much, and nothing is held."""
    wait_for(lambda: engine.is_idle)
    assert len(engine.given_up) == num_given_up
    if num_given_up:
        engine.check_given_up()
    check_idle(engine.engine)


def long_gen(name: str) -> Any:
    """One that takes some hundreds of milliseconds."""
    return pm.gen(name, max_tokens=120, ignore_eos=True, temperature=0)


def when_running(engine: WatchedEngine, count: int) -> None:
    wait_for(lambda: engine.stats().num_running >= count)


def run(engine: WatchedEngine, body: Callable[..., object], **options: Any) -> pm.State:
    return pm.function(body).run(backend=engine, **options)


def test_a_run_past_its_timeout_is_freed(engine: WatchedEngine) -> None:
    def body(s: pm.State) -> None:
        s += "once there was" + long_gen("x")
        branches = s.fork(3)
        branches += long_gen("y")
        branches.join()

    with pytest.raises(pm.ProgramTimeout, match=r"of the run passed before gen\('[xy]'\)"):
        run(engine, body, timeout=0.1)
    check_freed(engine, 1)


def test_branches_past_their_timeout_are_freed_and_the_program_goes_on(
    engine: WatchedEngine,
) -> None:
    def body(s: pm.State) -> None:
        s += "once there was a town"
        branches = s.fork(3, timeout=0.1)
        branches += lambda i: f" {i}" + long_gen("x")
        with pytest.raises(pm.ProgramTimeout, match=r"fork\(3\) at"):
            branches.join()
        s += "; so" + pm.gen("end", max_tokens=5, ignore_eos=True)
        wait_for(lambda: len(engine.given_up) == 3)

    state = run(engine, body)
    assert state.meta("end")["completion_tokens"] == 5
    check_freed(engine, 3)


def test_a_cancelled_branch_is_freed_while_its_siblings_go_on(engine: WatchedEngine) -> None:
    def body(s: pm.State) -> None:
        s += "once there was a town"
        branches = s.fork(3)
        branches += lambda i: f" {i}"
        inner = branches[1].fork(2)
        for branch in (branches[0], *inner, branches[2]):
            branch += long_gen("x")
        when_running(engine, 4)
        branches[1].cancel()
        wait_for(lambda: engine.stats().num_running == 2)
        assert {name.split("-")[1] for name in engine.given_up} == {"0.1.0.0", "0.1.0.1"}
        branches.join()

    state = run(engine, body)
    assert [meta["completion_tokens"] for meta in state.meta("x")] == [120, 120]
    check_freed(engine, 2)


def test_those_that_are_not_among_the_first_are_freed(engine: WatchedEngine) -> None:
    def body(s: pm.State) -> list[tuple[int, ...]]:
        s += "once there was a town"
        branches = s.fork(5)
        for number, branch in enumerate(branches):
            tokens = 5 + 5 * number if number < 2 else 120
            branch += f" {number}" + pm.gen("x", max_tokens=tokens, ignore_eos=True)
        best = pm.first_k(branches, 2)
        branches.join()
        assert len(s["x"]) == 2
        return [state.path for state in best]

    assert run(engine, body).ret_value == [(0, 0), (0, 1)]
    check_freed(engine, 3)


@pytest.mark.parametrize("max_tokens", [7, 40, 128])
def test_branches_share_a_budget_to_the_token(engine: WatchedEngine, max_tokens: int) -> None:
    def body(s: pm.State) -> None:
        s += "once there was a town"
        branches = s.fork(6, max_total_tokens=60)
        branches += lambda i: f" {i}" + pm.gen("x", max_tokens=max_tokens, ignore_eos=True)
        for branch in branches:
            assert isinstance(branch.error(), pm.TokenBudgetExceeded | None)

    state = run(engine, body)
    assert state.usage().completion_tokens == min(60, 6 * max_tokens)
    check_freed(engine, 0)


def test_a_budget_completes_a_constraint(engine: WatchedEngine) -> None:
    def body(s: pm.State) -> None:
        s += "data: " + pm.gen("x", regex=r"\[([0-9],){0,50}[0-9]\]", max_tokens=60)

    state = run(engine, body, max_total_tokens=9)
    assert state["x"].startswith("[")
    assert state["x"].endswith("]")
    assert state.usage().completion_tokens <= 9
    check_freed(engine, 0)


def test_a_failing_join_frees_the_siblings(engine: WatchedEngine) -> None:
    def body(s: pm.State) -> None:
        s += "once there was a town"
        branches = s.fork(3)
        branches[0] += " 0" + long_gen("x")
        branches[2] += " 2" + long_gen("x")
        when_running(engine, 2)
        branches[1] += "x" * 5000 + pm.gen("x")  # more than the pool has room for
        branches.join()

    with pytest.raises(pm.PrimitiveFailed, match=r"gen\('x'\) at .*test_limits\.py:\d+ failed"):
        run(engine, body)
    wait_for(lambda: engine.is_idle)
    assert len(engine.given_up) >= 2
    assert engine.stats().num_available_pages == engine.stats().num_pages
