"""The comparison with other engines: what it asks, checks and counts, on workers that are scripted.

No peer is installed here; ours runs on a tiny model.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import command, plot, tables
from benchmarks.peers.engines import Engine, Worker, WorkerDied
from benchmarks.peers.measure import Bench, Results, Row
from benchmarks.peers.workers.serving import Peer, Unsupported, common_beginning, perform
from benchmarks.peers.workloads import (
    SECONDS,
    SPEED,
    WORKLOADS,
    Writer,
    num_alike,
    outputs_of,
)
from palmette.runtime.tokenization import ByteTokenizer

SCRIPTED = """
import sys
from benchmarks.peers.workers.serving import Peer, Unsupported, serve

class Scripted(Peer):
    weights = "packed"

    def __init__(self, options):
        if options.get("broken"):
            raise ImportError("it is not there")
        self.short = options.get("short", 0)
        print("noise of the library")

    def about(self):
        return {"scripted": "1"}

    def stream(self, prompt, num_tokens):
        return self.generate([prompt], num_tokens)[0], 1e-6

    def generate(self, prompts, num_tokens):
        return [[sum(prompt) % 50] * (num_tokens - self.short) for prompt in prompts]

    def score(self, prompts, options):
        if self.short:
            sys.exit("it fell over")
        return [[-1.0 - len(o) for o in each] for each in options]

serve(Scripted)
"""


class Recording(Peer):
    """Answers with the number of its calls, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def stream(self, prompt: Any, num_tokens: int) -> tuple[list[int], float]:
        return [1] * num_tokens, 0.0

    def generate(self, prompts: Any, num_tokens: int) -> list[list[int]]:
        self.asked.append([list(prompt) for prompt in prompts])
        return [[100 * len(self.asked) + index] for index in range(len(prompts))]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes workers of the script above."""
    path = tmp_path / "scripted_worker.py"
    path.write_text(textwrap.dedent(SCRIPTED))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[Worker] = []

    def make(name: str = "scripted", **options: Any) -> Worker:
        engine = Engine(name, Path(sys.executable), "scripted_worker", options)
        started.append(Worker(engine, 1, tmp_path / f"{name}.log"))
        return started[-1]

    yield make
    for worker in started:
        worker.stop()


def test_trees_and_chats_are_made_of_plain_requests() -> None:
    peer = Recording()
    answers = peer.tree([7], [[[1], [2]], [[3], [4]]], 1)
    assert peer.asked == [
        [[7, 1], [7, 2]],
        [[7, 1, 100, 3], [7, 1, 100, 4], [7, 2, 101, 3], [7, 2, 101, 4]],
    ]
    assert answers == [[100], [101], [200], [201], [202], [203]]
    peer = Recording()
    answers = peer.chat([[[1], [2]], [[5], [6]]], 1)
    assert peer.asked == [[[1], [5]], [[1, 100, 2], [5, 101, 6]]]
    assert answers == [[100], [101], [200], [201]]


def test_the_first_request_of_a_batch_can_go_alone() -> None:
    peer = Recording()
    task = {"kind": "batch", "prompts": [[1], [2], [3]], "num_tokens": 1, "first_alone": True}
    answer = perform(peer, task)
    assert peer.asked == [[[1]], [[2], [3]]]
    assert answer["ids"] == [[100], [200], [201]]
    assert answer["seconds"] >= 0
    with pytest.raises(Unsupported, match="JSON"):
        perform(peer, {"kind": "json", "prompts": [[1]], "schema": {}, "max_tokens": 1})
    with pytest.raises(ValueError, match="no task 'x'"):
        perform(peer, {"kind": "x"})


def test_what_texts_begin_with_and_where_they_part() -> None:
    assert common_beginning([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]]) == 2
    assert common_beginning([[1], [1, 2]]) == 1
    assert common_beginning([[], [1]]) == 0
    assert num_alike([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]]) == (3, 5)
    assert outputs_of({"logprobs": [[-2.0, -1.0], [-1.0, -3.0]]}) == [[1], [0]]
    assert outputs_of({"filled": []}) == []


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_workload_is_the_same_for_the_same_seed(name: str) -> None:
    def task(seed: int) -> Any:
        return WORKLOADS[name](Writer(ByteTokenizer(), seed, name), "tiny").task()

    assert task(1) == task(1) != task(2)


def test_lengths_and_validity_are_checked() -> None:
    writer = Writer(ByteTokenizer(), 0)
    stream = WORKLOADS["stream-128"](writer, "tiny")
    task = stream.task()
    assert len(task["prompt"]) == 24
    answer = {"seconds": 3.0, "first_seconds": 1.0, "ids": [[1] * 6]}
    assert stream.figures(task, answer) == {"decoding": 2.5, "first token": 1000}
    with pytest.raises(ValueError, match=r"outputs of \[5\] tokens, 1 of them; 1 of 6 were asked"):
        stream.figures(task, {**answer, "ids": [[1] * 5]})
    filling = WORKLOADS["json"](writer, "tiny")
    task = filling.task()
    tag = task["schema"]["properties"]["tags"]["items"]["enum"][0]
    good = {"name": "x", "age": 3, "member": True, "tags": [tag]}
    texts = [json.dumps(good), json.dumps({**good, "age": 121})]
    filled = [{"text": text, "num_tokens": 20} for text in texts]
    figures = filling.figures(task, {"seconds": 2.0, "filled": filled})
    assert figures == {"all": 2.0, "valid": 50, "written": 40}
    with pytest.raises(ValueError, match="1 objects, 2 were asked for"):
        filling.figures(task, {"seconds": 2.0, "filled": filled[:1]})
    select = WORKLOADS["select"](writer, "tiny")
    scores = [[-1.0, -2.0, -3.0, 0.5]] * 3
    with pytest.raises(ValueError, match="not below 0"):
        select.figures(select.task(), {"seconds": 1.0, "logprobs": scores})


def test_engines_take_turns_and_failures_are_told(scripted: Any) -> None:
    good, bad = scripted("ours-good"), scripted("bad", short=1)
    for worker in (good, bad):
        worker.start(60)
    said: list[str] = []
    bench = Bench([good, bad], ByteTokenizer(), "tiny", say=said.append)
    results = bench.run(["batch", "select", "json"], 3)
    assert good.about == {"scripted": "1"}
    assert good.start_seconds > 0
    assert good.peak_bytes > 0
    assert good.busy_elsewhere is None or good.busy_elsewhere >= 0
    by_figure = {(row.workload, row.figure): row.values for row in results.rows}
    assert set(by_figure["batch", "generated"]) == {"ours-good"}
    assert len(by_figure["select", "all"]["ours-good"]) == 3
    assert "3 of 3 were asked for" in results.remarks["batch", "bad"]
    assert results.remarks["select", "bad"] == "its process died: it fell over"
    assert ("json", "bad") not in results.remarks  # said once
    assert results.remarks["json", "ours-good"].startswith("not supported")
    assert results.alike["batch", "ours-good"] == (27, 27)
    # the warm-up of each, then the rounds, for which the order turns
    assert [line.split(":")[0] for line in said if line.startswith("batch")][:2] == [
        "batch, ours-good",
        "batch, bad",
    ]


def test_a_worker_that_cannot_start_or_is_late_is_told(scripted: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="ImportError: it is not there"):
        scripted(broken=True).start(60)
    absent = Engine("absent", tmp_path / "python", "none", {})
    with pytest.raises(WorkerDied, match="cannot start"):
        Worker(absent, 1, tmp_path / "log").start(60)
    with pytest.raises(WorkerDied, match="no answer in"):
        scripted("late").start(0.01)
    with pytest.raises(WorkerDied, match="not running"):
        scripted("idle").ask({}, 1)


def test_ratios_are_of_engines_with_the_same_weights(tmp_path: Path) -> None:
    workers = []
    for name, weights in (("ours-a", "packed"), ("ours-b", "bf16"), ("peer", "packed")):
        workers.append(Worker(Engine(name, tmp_path, "none", {}), 1, tmp_path / name))
        workers[-1].weights = weights
    fast = Row("batch", "", "generated", SPEED, {"ours-a": [30, 10, 20], "peer": [10]})
    slow = Row("tree", "", "all", SECONDS, {"ours-a": [1.0], "peer": [4.0]})
    assert fast.times_better("ours-a", "peer") == 2
    assert slow.times_better("ours-a", "peer") == 4
    assert slow.times_better("ours-b", "peer") is None
    table = tables.ratio_table(Results([fast, slow]), workers)
    assert table is not None
    assert [column.header for column in table.columns][2:] == ["ours-a\nbeside peer"]
    assert tables.ratio_table(Results([fast]), workers[:2]) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--peer theirs=/bin/sh", "it must be one of llama.cpp, "),
        ("--peer vllm", "it must be one of llama.cpp, "),
        ("--peer vllm=/no/such/python", "there is no interpreter"),
        ("--rounds 0", "at least 1"),
        ("--workloads dancing", "invalid choice"),
    ],
)
def test_arguments_are_checked(
    capsys: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments.split())
    assert words in capsys.readouterr().err


@pytest.mark.model
def test_an_interrupt_leaves_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def ask(self: Worker, task: Any, timeout: float) -> Any:
        asked.append(task)
        if len(asked) == 3:
            signal.raise_signal(signal.SIGTERM)
        return {"seconds": 2.0, "ids": [[1] * 3] * 3}

    monkeypatch.setattr(Worker, "start", lambda self, timeout: None)
    monkeypatch.setattr(Worker, "ask", ask)
    command.main(f"--tiny --rounds 5 --ours packed --workloads batch --work-dir {tmp_path}".split())
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert "all tokens" in printed
    assert len(asked) == 3  # the warm-up, a whole round, and the one that was cut off


@pytest.mark.model
def test_ours_runs_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--rounds 1 --ours packed --threads 1 --work-dir {tmp_path / 'work'}"
    command.main(f"--tiny {arguments} --workloads tree json".split())
    printed = capsys.readouterr().out
    assert "ours-packed" in printed
    assert "left out" not in printed


@pytest.mark.model
@pytest.mark.slow
def test_ours_runs_every_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out" / "figures.json"
    command.main(
        f"--tiny --rounds 1 --ours packed torch --threads 1 --work-dir {tmp_path / 'work'} "
        f"--json {out}".split()
    )
    printed = capsys.readouterr().out
    assert "ours-packed" in printed
    told = json.loads(out.read_text())
    assert told["remarks"] == []
    assert {row["workload"] for row in told["figures"]} == set(WORKLOADS)
    assert all(len(row["values"]) == 2 for row in told["figures"])
    valid = [row["values"] for row in told["figures"] if row["figure"] == "valid"]
    assert valid == [{"ours-packed": [100], "ours-torch": [100]}]
    # the folder's weights are the file's
    shares = [each["ids"] / each["of"] for each in told["alike"] if each["engine"] == "ours-torch"]
    assert sum(shares) / len(shares) > 0.7


def test_figures_of_several_runs_are_plotted_once_each(tmp_path: Path) -> None:
    def run(engines: list[str], *rows: tuple[str, str, dict[str, list[float]]]) -> Path:
        figures = [
            {"workload": workload, "figure": "all", "unit": unit, "values": values}
            for workload, unit, values in rows
        ]
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"engines": dict.fromkeys(engines), "figures": figures}))
        return path

    one = run(["ours", "peer"], ("tree", "s", {"ours": [1.0, 3.0, 2.0], "peer": [4.0]}))
    other = run(["ours", "late"], ("tree", "s", {"ours": [9.0], "late": [5.0]}), ("json", "%", {}))
    texts = []
    for name in ("a.svg", "b.svg"):
        plot.main([str(one), str(other), str(tmp_path / name)])
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    for shown in ("tree: all", "s (less is better)", "ours", "peer", "late"):
        assert f">{shown}<" in texts[0]
    assert "json: all" not in texts[0]
