"""Runs of a workload under different setups, and what each of them cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import palmette as pm
from benchmarks.programs.workload import Workload
from palmette.runtime.config import EngineOptions, PolicyName
from palmette.runtime.recording import Recording

MakeEngine = Callable[[EngineOptions], pm.Engine]
"""A fresh engine with an empty cache; every option that is not given is the maker's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a workload is run. What is not said is as Palmette does it by default."""

    name: str = "palmette"
    prefix_cache: bool = True
    policy: PolicyName = "program"
    small_pool: bool = False  # room for twice the longest request, instead of for all
    random_order: bool = False  # of the programs in the batch
    one_by_one: bool = False  # a program starts when the one before has ended
    parallel: bool = True  # the branches of a fork run together

    def changes(self, workload: Workload) -> bool:
        """Whether it makes a difference to this workload; that nothing is changed is one as well.

        Only that branches run one after the other is none to programs without branches.
        """
        is_serial_only = not self.parallel and replace(self, name="", parallel=True) == _PLAIN
        return workload.has_branches or not is_serial_only


_PLAIN = Setup(name="")

ABLATIONS: dict[str, Mapping[str, Any]] = {
    "no-cache": {"prefix_cache": False},
    "fcfs": {"policy": "fcfs"},
    "lpm": {"policy": "lpm"},
    "small-pool": {"small_pool": True},
    "random-order": {"random_order": True},
    "one-by-one": {"one_by_one": True},
    "serial-branches": {"parallel": False},
}


def setup_of(name: str) -> Setup:
    """The setup of an ablation, or of several joined by `+`. Raises ValueError for unknown ones."""
    changes: dict[str, Any] = {}
    for part in name.split("+"):
        if part not in ABLATIONS:
            raise ValueError(f"unknown ablation {part!r}, known: {', '.join(ABLATIONS)}")
        changes.update(ABLATIONS[part])
    return replace(Setup(), name=name, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run cost. Rates are of prompt tokens; `best` is the offline optimum (see `Optimum`),
    `exact` what a table of whole sequences would have hit.
    """

    workload: str
    setup: str
    num_programs: int
    num_requests: int
    pool_tokens: int
    longest: int
    seconds: float
    prompt_tokens: int
    hit_rate: float
    best_hit_rate: float
    exact_hit_rate: float
    computed_tokens: int
    fewest_tokens: int
    recomputed_tokens: int
    num_preemptions: int

    @property
    def programs_per_second(self) -> float:
        return self.num_programs / self.seconds

    @property
    def share_of_best(self) -> float:
        """Hit rate / offline optimum."""
        return self.hit_rate / self.best_hit_rate if self.best_hit_rate else 1.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "programs_per_second": self.programs_per_second,
            "share_of_best": self.share_of_best,
        }


class Bench:
    """Measures workloads on engines from `make_engine`, each run on a fresh one."""

    def __init__(self, make_engine: MakeEngine, *, page_size: int = 16, seed: int = 0) -> None:
        self._make_engine = make_engine
        self._page_size = page_size
        self._seed = seed
        self._longest: dict[str, int] = {}

    def measure(self, workload: Workload, setup: Setup | None = None) -> Figures:
        """Run every program of the workload once."""
        setup = setup or Setup()
        options: EngineOptions = {
            "page_size": self._page_size,
            "policy": setup.policy,
            "prefix_cache": setup.prefix_cache,
        }
        if setup.small_pool:
            options["num_pages"] = -(-2 * self._longest_request(workload) // self._page_size)
        with self._make_engine(options) as engine:
            return self._run(engine, workload, setup)[0]

    def requests(self, workload: Workload) -> Recording:
        """What the workload asks of an engine, by the default setup."""
        with self._make_engine({"page_size": self._page_size}) as engine:
            return self._run(engine, workload, Setup())[1]

    def _longest_request(self, workload: Workload) -> int:
        if workload.name not in self._longest:
            self.measure(workload)
        return self._longest[workload.name]

    def _run(
        self, engine: pm.Engine, workload: Workload, setup: Setup
    ) -> tuple[Figures, Recording]:
        _warm_up.run(backend=engine)
        engine.flush_cache()
        arguments = list(workload.arguments)
        if setup.random_order:
            random.Random(self._seed).shuffle(arguments)
        num_at_once = 1 if setup.one_by_one else len(arguments)
        recording = Recording(engine, known=num_at_once)
        program = workload.program
        if workload.has_branches:
            program = program.bind(parallel=setup.parallel)
        before, start = engine.stats(), time.perf_counter()
        program.run_batch(
            arguments, backend=recording, num_threads=num_at_once, temperature=0, ignore_eos=True
        )
        seconds, did = time.perf_counter() - start, engine.stats().since(before)
        best = recording.optimum()
        self._longest.setdefault(workload.name, recording.longest)
        figures = Figures(
            workload=workload.name,
            setup=setup.name,
            num_programs=len(arguments),
            num_requests=len(recording.asked),
            pool_tokens=did.num_pages * did.page_size,
            longest=recording.longest,
            seconds=seconds,
            prompt_tokens=did.prompt_tokens,
            hit_rate=did.hit_rate,
            best_hit_rate=best.hit_rate,
            exact_hit_rate=best.exact_hit_rate,
            computed_tokens=did.computed_tokens,
            fewest_tokens=best.computed_tokens,
            recomputed_tokens=did.recomputed_tokens,
            num_preemptions=did.preemptions,
        )
        return figures, recording


@pm.function
def _warm_up(s: pm.State) -> None:
    s += "The first run of an engine is slower." + pm.gen(max_tokens=2, ignore_eos=True)
