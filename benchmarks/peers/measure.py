"""Rounds of workloads over engines that take turns, and what comes of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.engines import Worker, WorkerDied
from benchmarks.peers.workloads import (
    WORKLOADS,
    Size,
    Unit,
    Workload,
    Writer,
    num_alike,
    outputs_of,
)
from palmette.runtime.tokenization import LoadedTokenizer


@dataclass(slots=True)
class Row:
    """A figure of a workload: its values by engine, one for each round."""

    workload: str
    tell: str
    figure: str
    unit: Unit
    values: dict[str, list[float]] = field(default_factory=dict)

    def median(self, engine: str) -> float | None:
        values = self.values.get(engine)
        return statistics.median(values) if values else None

    def times_better(self, ours: str, theirs: str) -> float | None:
        """How many times as good as theirs ours is, by medians."""
        one, other = self.median(ours), self.median(theirs)
        if not one or not other:
            return None
        return one / other if self.unit.more_is_better else other / one


@dataclass(slots=True)
class Results:
    """What was measured; `remarks` are by workload and engine, where there is no figure.

    `alike` counts, by workload and engine, the ids that agree with those of the first engine up to
    where an output parts from it, and all ids.
    """

    rows: list[Row] = field(default_factory=list)
    remarks: dict[tuple[str, str], str] = field(default_factory=dict)
    alike: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)


class Bench:
    """Puts workers through workloads, round by round: each workload once by each worker in turn."""

    def __init__(
        self,
        workers: Sequence[Worker],
        tokenizer: LoadedTokenizer,
        size: Size,
        *,
        seed: int = 0,
        timeout: float = 600.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._workers = list(workers)
        self._tokenizer = tokenizer
        self._size: Size = size
        self._seed = seed
        self._timeout = timeout
        self._say = say
        self.results = Results()
        self._rows: dict[tuple[str, str], Row] = {}
        self._dead: set[str] = set()

    def run(self, names: Sequence[str], num_rounds: int) -> Results:
        """All rounds, behind a small one that is not counted. Those that die are left out."""
        for name in names:
            self._warm_up(name)
        for number in range(num_rounds):
            for name in names:
                self._take_turns(name, number)
        return self.results

    def _warm_up(self, name: str) -> None:
        workload = self._workload(name, "tiny", "warm-up")
        task = workload.task()
        for worker in self._workers:
            self._ask(worker, workload, task)

    def _take_turns(self, name: str, number: int) -> None:
        workload = self._workload(name, self._size, number)
        task = workload.task()
        for figure, unit in workload.units.items():
            key = name, figure
            if key not in self._rows:
                self._rows[key] = Row(name, workload.tell, figure, unit)
                self.results.rows.append(self._rows[key])
        first: list[list[int]] | None = None
        # Each worker comes first in some round, so that none always follows the same neighbour.
        turn = number % len(self._workers) if self._workers else 0
        answers: dict[str, Mapping[str, Any]] = {}
        for worker in self._workers[turn:] + self._workers[:turn]:
            answer = self._ask(worker, workload, task)
            if answer is not None:
                answers[worker.name] = answer
        for worker in self._workers:
            if worker.name in answers:
                outputs = outputs_of(answers[worker.name])
                first = outputs if first is None else first
                self._note_alike(name, worker.name, first, outputs)

    def _ask(
        self, worker: Worker, workload: Workload, task: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """The answer if it is a right one; its figures are noted unless this is the warm-up."""
        key = workload.name, worker.name
        if key in self.results.remarks or worker.name in self._dead:
            return None
        try:
            answer = worker.ask(task, self._timeout)
            if "unsupported" in answer:
                self.results.remarks[key] = f"not supported: {answer['unsupported']}"
                return None
            if "error" in answer:
                raise ValueError(answer["error"])
            figures = workload.figures(dict(task), answer)
        except (WorkerDied, ValueError) as error:
            if isinstance(error, WorkerDied):
                self._dead.add(worker.name)
            self.results.remarks[key] = str(error)
            self._say(f"{workload.name}, {worker.name}: {error}")
            return None
        for figure, value in figures.items():
            if (workload.name, figure) in self._rows:
                self._rows[workload.name, figure].values.setdefault(worker.name, []).append(value)
        self._say(f"{workload.name}, {worker.name}: {answer['seconds']:.2f} s")
        return answer

    def _note_alike(
        self, name: str, engine: str, first: list[list[int]], outputs: list[list[int]]
    ) -> None:
        alike, total = num_alike(first, outputs)
        if total:
            before, all_before = self.results.alike.get((name, engine), (0, 0))
            self.results.alike[name, engine] = before + alike, all_before + total

    def _workload(self, name: str, size: Size, key: str | int) -> Workload:
        return WORKLOADS[name](Writer(self._tokenizer, self._seed, name, key), size)
