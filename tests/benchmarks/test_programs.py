"""The workloads: the same every time, and the cache finds nearly all that can be found.

On a model with random weights and a tokenizer of bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.programs import WORKLOADS, Workload
from benchmarks.programs.__main__ import main
from benchmarks.programs.measure import ABLATIONS, Bench, Setup, setup_of
from palmette.protocol import Request, ScoreRequest
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.config import EngineOptions
from palmette.runtime.recording import Recording
from palmette.runtime.testing import tiny_engine

EVERY_WORKLOAD = pytest.mark.parametrize("name", list(WORKLOADS))

# Of the offline optimum, in a pool of twice the longest request with all programs at once. What is
# lost is lost where programs share with each other, or append more than they could announce.
SMALL_POOL = 0.95


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(make_engine)


def make_engine(options: EngineOptions) -> AsyncEngine:
    return AsyncEngine.over(lambda: tiny_engine(**{"num_pages": 4096, **options}))


def workload(name: str, seed: int = 0) -> Workload:
    return WORKLOADS[name]("tiny", seed)


def asked_of(recording: Recording) -> list[tuple[tuple[int, ...], ...]]:
    """Prompts and what is scored after them, in an order of their own."""
    return sorted(
        (r.token_ids, *(r.continuations if isinstance(r, ScoreRequest) else ()))
        for r in recording.asked
    )


@EVERY_WORKLOAD
def test_texts_are_made_from_the_seed_alone(name: str) -> None:
    assert workload(name).arguments == workload(name).arguments
    assert workload(name).arguments != workload(name, seed=1).arguments
    quick, full = (len(WORKLOADS[name](size, 0).arguments) for size in ("quick", "full"))
    assert quick < full


@EVERY_WORKLOAD
def test_a_workload_asks_the_same_every_time(bench: Bench, name: str) -> None:
    first = bench.requests(workload(name))
    assert len(first.asked) >= len(workload(name).arguments)
    assert asked_of(bench.requests(workload(name))) == asked_of(first)
    is_one_request_each = len(first.asked) == len(workload(name).arguments)
    assert workload(name).is_known == is_one_request_each


@EVERY_WORKLOAD
def test_with_a_large_pool_nearly_all_that_can_be_found_is(bench: Bench, name: str) -> None:
    figures = bench.measure(workload(name))
    assert figures.best_hit_rate > 0.3
    assert figures.share_of_best >= 0.99
    assert figures.num_preemptions == 0
    assert figures.computed_tokens == figures.fewest_tokens


@EVERY_WORKLOAD
def test_with_a_small_pool_little_of_it_is_lost(bench: Bench, name: str) -> None:
    figures = bench.measure(workload(name), setup_of("small-pool"))
    assert figures.pool_tokens < 2 * figures.longest + 16
    assert figures.share_of_best >= SMALL_POOL
    assert figures.num_preemptions == 0


@pytest.mark.parametrize("name", ["chat-short", "chat-long"])
def test_a_policy_that_knows_no_programs_loses_much_in_a_small_pool(
    bench: Bench, name: str
) -> None:
    figures = bench.measure(workload(name), setup_of("small-pool+lpm"))
    assert figures.share_of_best < 0.9


@EVERY_WORKLOAD
def test_without_a_cache_everything_is_computed(bench: Bench, name: str) -> None:
    figures = bench.measure(workload(name), setup_of("no-cache"))
    assert figures.hit_rate == 0
    assert figures.computed_tokens >= figures.prompt_tokens > figures.fewest_tokens


def test_the_order_of_arrival_loses_what_the_default_policy_keeps(bench: Bench) -> None:
    agents = workload("agents")
    by_arrival = bench.measure(agents, setup_of("small-pool+fcfs"))
    assert by_arrival.share_of_best < 0.5
    assert bench.measure(agents, setup_of("small-pool")).share_of_best > 0.95


@pytest.mark.parametrize("name", ["random-order", "one-by-one", "serial-branches", "lpm", "fcfs"])
def test_an_ablation_changes_when_things_are_asked_and_not_what(name: str) -> None:
    judge = workload("judge")
    bench = Bench(make_engine)
    plain, changed = bench.measure(judge), bench.measure(judge, setup_of(name))
    assert changed.setup == name
    assert changed.num_requests == plain.num_requests
    assert changed.prompt_tokens == plain.prompt_tokens


def judged(parallel: bool) -> list[str]:
    """What is asked for each of the judge's four sides, in order."""
    program = workload("judge").program.bind(parallel=parallel)
    with make_engine({}) as engine:
        backend = Recording(engine)
        program.run(essay="All is well.", num_tokens=2, backend=backend, ignore_eos=True)
    return ["judge" if isinstance(r, Request) else "mark" for r in backend.asked[:8]]


def test_branches_run_together_or_one_after_the_other() -> None:
    assert judged(parallel=False) == ["judge", "mark"] * 4
    assert judged(parallel=True)[:4] == ["judge"] * 4


def test_ablations_are_joined_and_unknown_ones_named() -> None:
    both = setup_of("small-pool+fcfs")
    assert (both.small_pool, both.policy, both.prefix_cache) == (True, "fcfs", True)
    with pytest.raises(ValueError, match="unknown ablation 'magic', known: no-cache"):
        setup_of("small-pool+magic")


def test_an_ablation_of_branches_is_left_out_where_there_are_none() -> None:
    serial = setup_of("serial-branches")
    assert serial.changes(workload("judge"))
    assert not serial.changes(workload("mmlu"))
    assert setup_of("serial-branches+no-cache").changes(workload("mmlu"))
    assert Setup().changes(workload("mmlu"))
    assert all(setup_of(name).changes(workload("judge")) for name in ABLATIONS)


def test_the_command_prints_a_table_and_writes_the_figures(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "figures.json"
    main(
        ["--quick", "--workloads", "mmlu", "--ablations", "small-pool+fcfs", "--json", str(path)],
    )
    printed = capsys.readouterr().out
    assert "MMLU, 5-shot" in printed
    assert "small-pool+fcfs" in printed
    figures = json.loads(path.read_text())
    assert [run["setup"] for run in figures["runs"]] == ["palmette", "small-pool+fcfs"]
    assert figures["runs"][0]["share_of_best"] == pytest.approx(1)


def test_the_command_refuses_an_unknown_ablation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--ablations", "magic"])
    assert "unknown ablation 'magic'" in capsys.readouterr().err
