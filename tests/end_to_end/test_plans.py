"""Plans on an engine: what is predicted is computed, and what order and sharing save."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import palmette as pm
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineOptions
from palmette.runtime.testing import tiny_engine


def engine_of(**options: object) -> AsyncEngine:
    chosen: EngineOptions = {"num_pages": 256, **options}  # type: ignore[typeddict-item]
    return AsyncEngine.over(lambda: tiny_engine(**chosen))


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with engine_of() as made:
        yield made
        assert made.stats().num_held_pages == 0


@pm.function
def ask(s: pm.State, document: str, question: str) -> None:
    s += document + " " + question + pm.gen("a", max_tokens=4)


RNG = random.Random(0)
DOCUMENTS = ["".join(RNG.choice("abcdefghij") for _ in range(100)) for _ in range(6)]
INTERLEAVED = [
    {"document": document, "question": f"{index} {RNG.random():.8f}"}
    for index in range(6)
    for document in DOCUMENTS
]


@pytest.mark.parametrize("num_threads", [2, 96])
def test_what_is_predicted_is_prefilled(engine: AsyncEngine, num_threads: int) -> None:
    plan = ask.plan(INTERLEAVED, backend=engine, temperature=0)
    assert plan.predicted.is_exact
    states = ask.run_batch(
        INTERLEAVED, backend=engine, temperature=0, plan=plan, num_threads=num_threads
    )
    usages = [state.usage() for state in states]
    assert sum(usage.prefilled_tokens for usage in usages) == plan.predicted.prefilled_tokens
    assert sum(usage.prompt_tokens for usage in usages) == plan.predicted.prompt_tokens


def test_order_saves_where_few_programs_run_and_little_fits_and_costs_nothing_elsewhere() -> None:
    """24 pages of 16 tokens hold three documents; six come by turns."""
    prefilled = {}
    for num_pages, num_threads in ((24, 2), (24, 96), (256, 2)):
        for is_planned in (False, True):
            with engine_of(num_pages=num_pages) as engine:
                plan = ask.plan(INTERLEAVED, backend=engine, temperature=0)
                states = ask.run_batch(
                    INTERLEAVED,
                    backend=engine,
                    temperature=0,
                    plan=plan if is_planned else "auto",
                    num_threads=num_threads,
                )
                prefilled[num_pages, num_threads, is_planned] = sum(
                    state.usage().prefilled_tokens for state in states
                )
    known = plan.predicted.prefilled_tokens
    assert prefilled[24, 2, True] == known
    assert prefilled[24, 2, False] > 2.5 * known
    # With all requests before it, the engine finds the same order by itself, but for those that it
    # begins before the others have come: some, where the machine has much else to do.
    assert known <= prefilled[24, 96, False] < 2 * known
    assert prefilled[256, 2, True] == prefilled[256, 2, False] == known


def test_a_constant_that_all_begin_with_is_computed_once_without_being_computed_ahead(
    engine: AsyncEngine,
) -> None:
    items = [{"document": DOCUMENTS[0], "question": f"{index:02}"} for index in range(16)]
    plan = ask.plan(items, backend=engine)
    states = ask.run_batch(items, backend=engine, num_threads=16)
    assert sum(state.usage().prefilled_tokens for state in states) == (
        plan.predicted.prefilled_tokens
    )


@pm.function
def choose(s: pm.State, x: str) -> None:
    s += f"About {x}: " + pm.gen("a", max_tokens=6)
    s += " so " + pm.select("b", ["yes", "no"])
    branches = s.fork(2)
    branches += [f" {index} " + pm.gen("c", max_tokens=4) for index in range(2)]
    branches.join("concate_and_append")
    s += pm.gen("d", max_tokens=3, regex="[a-z]{3}")


def test_results_are_those_without_sharing_and_equal_programs_cost_one() -> None:
    items = ["tea", "milk", "tea", "tea", "milk"]
    results = {}
    for plan in ("auto", False):
        with engine_of() as engine:
            states = choose.run_batch(items, backend=engine, temperature=0, plan=plan)
            results[plan] = [(state.token_ids(), state["d"]) for state in states]
            usages = [state.usage() for state in states]
            did = engine.stats()
        assert sum(usage.prefilled_tokens for usage in usages) == (
            did.prompt_tokens - did.cached_tokens
        )
        if plan == "auto":
            shared = sum(usage.shared_tokens for usage in usages)
            all_completed = sum(usage.completion_tokens for usage in usages)
            assert shared == pytest.approx(all_completed * 3 / 5, abs=all_completed / 5)
    assert results["auto"] == results[False]


def test_the_first_of_those_that_share_may_be_cancelled(engine: AsyncEngine) -> None:
    @pm.function
    def program(s: pm.State, gives_up: bool) -> None:
        with s.copy() as branch:
            branch += "p" + pm.gen("a", max_tokens=200, ignore_eos=True)
            if gives_up:
                branch.cancel()

    states = program.run_batch(
        [[True], [False], [False]], backend=engine, temperature=0, num_threads=3
    )
    assert "a" not in states[0]
    assert states[1].raw("a") == states[2].raw("a")
    assert sum(state.usage().shared_tokens for state in states[1:]) == 200
