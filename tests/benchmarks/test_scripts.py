"""The benchmark scripts at their smallest: they run, count right and say what they found.

On models with random weights and a tokenizer of bytes; nothing here depends on how long it takes.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import (
    accuracy,
    frozen_prefix,
    growth,
    kernels,
    machine,
    memory,
    overhead,
    select,
    starvation,
)
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine
from palmette.runtime.kernels.cpu import extension
from palmette.runtime.loading import load_model
from palmette.runtime.testing import tiny_engine, tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer
from tests.runtime.loading.files import write_folder
from tests.runtime.models.tiny import oracle

QUIET = lambda _: None  # noqa: E731

SMALLEST = growth.Sizes(
    tree_nodes=200,
    nodes=(300, 600),
    tokens=(512, 1_024),
    branches=(1, 4),
    pages=(64, 128),
    evicted=500,
    waiting=(4, 8),
    samples=8,
    repeats=1,
    steps=6,
)


# growth


def test_growth_prints_every_panel_and_plots_the_same_file_for_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "growth.json"
    growth.main(["--plot", str(tmp_path / "1.svg"), "--json", str(figures)], SMALLEST)
    shown = capsys.readouterr().out
    data = json.loads(figures.read_text())
    assert len(data["panels"]) == 9
    for panel in data["panels"]:
        assert panel["title"] in shown
        for curve in panel["curves"]:
            assert curve["name"] in shown
            assert [point["size"] for point in curve["points"]] == sorted(
                {point["size"] for point in curve["points"]}
            )
            assert all(0 < point["median"] <= point["p99"] for point in curve["points"])
    again = growth.Figures()
    for panel, known in zip(again.panels, data["panels"], strict=True):
        for curve in known["curves"]:
            panel.curve(curve["name"]).points = [growth.Point(**p) for p in curve["points"]]
    growth.plot(again, tmp_path / "2.svg")
    assert (tmp_path / "2.svg").read_text() == (tmp_path / "1.svg").read_text()


def test_growth_tells_what_it_has_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(growth, "measure_match", interrupted)
    monkeypatch.setattr(growth, "measure_tree", lambda tree, n, sizes, f: f.evict.curve("x"))
    growth.main([], SMALLEST)
    told = capsys.readouterr()
    assert "interrupted" in told.err
    assert "Evict" in told.out


def test_a_curve_knows_its_slope() -> None:
    curve = growth.Curve("")
    assert curve.slope is None
    for size in (10, 100, 1_000):
        curve.add(size, [size**2 * 1e-9] * 3)
    assert curve.slope == pytest.approx(2)
    assert curve.points[-1].p99 == pytest.approx(1_000)


def test_a_grown_tree_holds_its_keys_with_as_many_branch_points() -> None:
    tree = growth.GrownTree(random.Random(0), 400, key_tokens=512, num_branches=4)
    assert 400 <= tree.cache.tree.num_nodes < 410
    for key in tree.keys:
        match = tree.cache.match(key)
        assert match.num_tokens == len(key)
        node, num_edges = match.found.node, 0
        while node is not None and node.parent is not None:
            node, num_edges = node.parent, num_edges + 1
        assert num_edges == 4  # the first branch point is the root


# overhead


def test_overhead_counts_nested_calls_once_and_takes_every_clock_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cached, uncached = tiny_engine(num_pages=512), tiny_engine(num_pages=512, prefix_cache=False)
    methods = {owner: dict(vars(owner)) for owner in overhead.PARTS}
    load = overhead.Load.of(6, 250, seed=0, scale=0.1)
    assert len({request.token_ids[0] for request in load.requests}) == 6
    figures = overhead.Figures()
    overhead.measure(cached, uncached, load, 2, figures, QUIET)
    assert all(0 < run.managing < run.seconds for run in figures.measured)
    assert [run.managing for run in figures.cached + figures.uncached] == [0.0] * 4
    assert figures.in_parts is not None
    parts = figures.in_parts.parts
    assert parts["Scheduler.next_plan"].calls >= figures.in_parts.steps
    assert parts["KVManager.admit"].calls == parts["Scheduler.add"].calls == 6
    assert sum(part.seconds for part in parts.values()) == pytest.approx(figures.in_parts.managing)
    assert {owner: dict(vars(owner)) for owner in overhead.PARTS} == methods
    overhead.report(figures, load, "float32")
    shown = capsys.readouterr().out
    assert f"share of tree and scheduler {figures.share:.3%}" in shown
    assert "RadixCache.publish" in shown
    json.dumps(figures.as_dict())


def test_lengths_are_long_tailed_and_within_their_bounds() -> None:
    load = overhead.Load.of(2_000, 49_000, seed=0)
    prompts, outputs = sorted(load.prompt_lengths), sorted(load.output_lengths)
    assert 50 < prompts[1_000] < 70
    assert 35 < outputs[1_000] < 45
    assert prompts[-1] == 700
    assert outputs[-1] == 200
    assert sum(prompts) / 2_000 > 1.5 * prompts[1_000]


# starvation


class Ticks:
    """A clock on which every look takes a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_cold_requests_starve_under_pure_longest_prefix_first_and_not_under_a_bound() -> None:
    setting = starvation.Setting(
        seconds=1.5,
        max_wait=0.3,
        num_hot=2,
        hot_tokens=40,
        question_tokens=4,
        max_new_tokens=4,
        depth=12,
        max_running=4,
        pool_tokens=2_048,
        num_cold=3,
        cold_tokens=30,
        long_tokens=150,
        stream_tokens=40,
    )
    traffic = starvation.Traffic(setting, 256)
    assert traffic.hot(3) == starvation.Traffic(setting, 256).hot(3)
    figures = starvation.Figures()
    clock = Ticks()

    def make_engine(options: EngineOptions) -> Engine:
        config = EngineConfig.of(options)
        return Engine.assemble("tiny", tiny_model(), ByteTokenizer(), config, clock)

    bounds = (starvation.StepBounds(32, None), starvation.StepBounds(256, 0.01))
    starvation.measure(
        make_engine, traffic, setting, figures, QUIET, step_bounds=bounds, clock=clock
    )
    by_name = {outcome.order: outcome for outcome in figures.outcomes}
    assert [len(outcome.cold) for outcome in figures.outcomes] == [3, 3, 3]
    starved = {name: o.num_starved(setting.max_wait) for name, o in by_name.items()}
    assert starved["program"] == starved["lpm"] == 0
    assert starved["pure lpm"] > 0
    assert by_name["pure lpm"].num_steps_too_late(setting.max_wait) > 0
    assert figures.num_compared > 10
    assert all(0.5 < o.hit_rate(figures.num_compared, hot_only=True) < 1 for o in by_name.values())
    assert tuple(stall.bounds for stall in figures.stalls) == bounds
    assert not any(math.isnan(stall.largest_gap_during) for stall in figures.stalls)
    assert all(len(outcome.gaps) > 10 for outcome in figures.outcomes)
    shown = "\n".join(starvation.lines(figures, setting))
    assert ">" in next(line for line in shown.splitlines() if line.startswith("pure lpm"))
    assert len(starvation.verdicts(figures, setting)) == 6
    json.dumps(starvation.as_dict(figures, setting))


# memory


def test_memory_serves_every_kind_and_samples_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = memory.Figures()
    engine = tiny_engine(num_pages=128)
    memory.measure(
        engine,
        num_requests=80,
        num_live=8,
        every=10,
        seed=0,
        trace=True,
        figures=figures,
        say=QUIET,
    )
    assert set(figures.ended) == set(memory.KINDS)
    assert 80 <= sum(figures.ended.values()) < 88  # those of the last step
    assert [sample.num_requests for sample in figures.samples] == list(range(10, 81, 10))
    assert all(sample.kib > 10_000 for sample in figures.samples)
    assert figures.grown
    while engine.has_work:
        engine.step()
    assert engine.stats().num_available_pages == 128
    memory.report(figures, "float32")
    assert "second half" in capsys.readouterr().out
    memory.plot(figures, tmp_path / "memory.svg")
    memory.plot(figures, tmp_path / "again.svg")
    assert (tmp_path / "memory.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    json.dumps(memory.as_dict(figures))


def test_the_interval_of_a_slope_holds_the_truth_though_samples_follow_from_one_another() -> None:
    xs = [index / 5 for index in range(50)]
    held = grown = 0
    for seed in range(200):
        rng, drift, ys = random.Random(seed), 0.0, []
        for x in xs:
            drift = 0.5 * drift + rng.gauss(0, 20)
            ys.append(1_000 + 50 * x + drift)
        line = memory.fit(xs, ys)
        held += abs(line.slope - 50) < line.uncertainty
        grown += not line.is_flat
        assert memory.fit(xs, [y - 60 * x for x, y in zip(xs, ys, strict=True)]).is_flat
    assert held > 160  # 140 if the samples were taken to be independent
    assert grown == 200


# frozen prefixes


def test_a_thawed_prefix_answers_as_a_computed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prefix"
    engine = tiny_engine()
    engine.freeze(frozen_prefix.prefix_ids(engine, 200), path)
    figures = frozen_prefix.Figures(file_bytes=path.stat().st_size)
    for way, file in ((frozen_prefix.COMPUTED, None), (frozen_prefix.THAWED, path)):
        figures.answers[way].append(
            frozen_prefix.answer(tiny_engine, 200, file, launched_at=time.time())
        )
    assert figures.ids_are_equal
    for found in figures.answers.values():
        assert all(len(a.token_ids) == 16 and a.thaw + a.first_token > 0 for a in found)
    frozen_prefix.report(figures, 200, "float32")
    assert "ids of the answers: equal" in capsys.readouterr().out


@pytest.mark.parametrize("script", [growth, overhead, starvation, memory, frozen_prefix])
def test_every_script_explains_itself(script: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])  # type: ignore[attr-defined]
    assert "--json" in capsys.readouterr().out


# kernels


@pytest.mark.skipif(extension() is None, reason="the extension was not built")
def test_kernels_are_compared_on_the_same_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = oracle(vocab_size=64, hidden_size=64, intermediate_size=96)
    path = write_folder(tmp_path / "m", model)
    loads = (kernels.Load("some", 3, 2, 20), kernels.Load("one", 1, 1, 5))
    figures = tmp_path / "kernels.json"
    arguments = ["--model", str(path), "--rounds", "2", "--seconds", "0", "--json", str(figures)]
    kernels.main(arguments, loads)
    shown = capsys.readouterr().out
    data = json.loads(figures.read_text())
    assert len(data) == 2 * 2 * 2
    assert all(len(times) == 2 and min(times) > 0 for times in data.values())
    assert "some" in shown
    assert "(1.00 x)" in shown


# accuracy and machine


@pytest.mark.skipif(extension() is None, reason="the extension was not built")
@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_products_are_as_exact_as_their_inputs(kind: str) -> None:
    for name in extension().available():
        exact = accuracy.product_error(name, kind, is_exact=True, n=32, k=256)
        rounded = accuracy.product_error(name, kind, is_exact=False, n=32, k=256)
        assert 0 < exact <= rounded < 1e-2
        if extension().takes(name, True, 0) == "float32" and name != "avx512_bf16":
            assert exact < 1e-6


@pytest.mark.skipif(extension() is None, reason="the extension was not built")
def test_ways_to_compute_a_model_are_held_against_the_first(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle(vocab_size=64, hidden_size=64, intermediate_size=96))
    ways = {
        "torch": load_model(path, "float32", kernels="torch"),
        "own": load_model(path, "float32", kernels="cpu"),
    }
    windows = accuracy.windows_of([(7 * i) % 64 for i in range(50)], 20)
    assert [len(window) for window in windows] == [20, 20]
    found = accuracy.compare(ways, "torch", windows)
    assert found["own"].agreement == 1
    assert abs(found["own"].divergence) < 1e-6
    assert found["own"].perplexity == pytest.approx(found["torch"].perplexity, rel=1e-4)
    assert found["torch"].perplexity > 1


def test_a_straight_line_is_found_and_what_it_leaves() -> None:
    assert machine.straight_line({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx((1, 2, 1))
    *_, explained = machine.straight_line({1: 1.0, 2: 9.0, 3: 1.0})
    assert explained == pytest.approx(0)


def test_bounds_are_of_what_a_step_must_read_and_multiply() -> None:
    loaded = tiny_model()
    config = loaded.config
    decode = kernels.Load("", 2, 1, 10)
    own = machine.bytes_read(loaded, decode)
    more = machine.bytes_read(loaded, kernels.Load("", 2, 1, 11))
    assert more - own == 2 * 2 * config.num_layers * config.kv_size * loaded.dtype.itemsize
    each = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    each += 3 * config.hidden_size * config.intermediate_size
    assert machine.operations(config, decode) == 2 * 2 * config.num_layers * each


def test_less_of_a_processor_is_measured_in_this_process(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "m", oracle(vocab_size=64, hidden_size=64, max_position_embeddings=4096)
    )
    found = machine.one(str(path), torch.get_num_threads(), 0.0)
    assert set(found) == {machine.DECODE.name, machine.PREFILL.name}
    assert min(found.values()) > 0


def test_a_report_of_the_machine_names_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {"tokens_per_second": 300.0, "bound": 500.0, "share": 0.6}
    figures = {
        "title": "some machine",
        "shares": {
            "gigabytes_per_second": 50.0,
            "tera_operations_per_second": 0.9,
            "ways": {"packed": {"decode": load}},
        },
        "by_batch": {"packed": dict.fromkeys(machine.BATCHES, 100.0)},
        "by_length": {"packed": {128: 200.0, 256: 210.0, 512: 230.0}},
        "by_waiting": {100: 1000.0, 1000: 1010.0, 5000: 1020.0},
        "with_less": {name: {"decode": 10.0} for name in machine.LESS},
    }
    machine.report(figures, Console(width=100))
    shown = capsys.readouterr().out
    assert "60%" in shown
    assert "5,000 waiting: +2.0%" in shown
    machine.plot(figures, tmp_path / "plot.svg")
    assert "Prefilling" in (tmp_path / "plot.svg").read_text()


# select


def test_select_takes_a_pass_where_one_by_one_takes_one_for_each_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--questions", "3", "--shared-tokens", "40", "--rounds", "2"]
    args = select.parse(["--quick", *sizes])
    assert select.measure(tiny_model(), ByteTokenizer(), args)
    shown = capsys.readouterr().out
    passes = [int(word) for word in re.findall(r"(\d+) passes", shown)]
    assert len(passes) == 5
    # Tokens are bytes here, and all options begin with a space: the rest waits for that.
    assert passes[0] == 3 * 2
    assert passes[1] == 3 * 4
    assert "3 questions" in shown
