"""What a trace costs: the time of a run with ``trace=True`` against the same without, and how large
a long trace is and how long it takes to take, write and read.

Two kinds of work on the engine, greedy and of fixed length: one program that forks, and a batch of
programs. Rounds of both ways alternate, the first of each pair changes, the cache is flushed before
each; told are medians, the median of the ratios of the pairs and where that of many more pairs
would lie with 95 % certainty (by the order of the ratios, whatever their distribution). A trace of
some thousand primitives by a script comes first, with the memory that its records took. What
`state.trace()` needs is recorded in every run: its share is that of the time within the methods
that record, by a clock around them.

    OMP_NUM_THREADS=2 python -m benchmarks.tracing
"""

from __future__ import annotations

import argparse
import gc
import inspect
import math
import random
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import palmette as pm
from palmette.lang.tracing.recording import AskRecord, BranchRecord, EventRecord, RunRecord
from palmette.protocol import Request, TokenBackend

GOAL_RATIO = 1.01
GOAL_PRIMITIVES = 5_000

BEGINNING = (
    "You are given an idea for a small tool. Think of what could go wrong with it, how it could be "
    "tried out soon, and who would want it. Say it in plain words. " * 4
)


@pm.function
def think(s: pm.State, topic: str, width: int) -> None:
    s += pm.system(BEGINNING)
    s += pm.user(topic)
    s += pm.assistant_begin()
    s += "First thought: " + pm.gen("first")
    branches = s.fork(width)
    for index, branch in enumerate(branches):
        branch += f"\nView {index + 1}: " + pm.gen("view")
    branches.join()
    s += "\nIn short: " + pm.gen("short")
    s += pm.assistant_end()


@pm.function
def ask(s: pm.State, number: int) -> None:
    s += pm.system(BEGINNING)
    s += pm.user(f"Idea number {number}")
    s += pm.assistant_begin()
    s += "Good for: " + pm.select("who", ["children", "engineers", "everyone"])
    s += "\nBecause: " + pm.gen("why")
    s += pm.assistant_end()


@pm.function
def steps(s: pm.State, number: int, count: int) -> None:
    s += BEGINNING + f"Case {number}. "
    for index in range(count // 2):
        s += f"Step {index}: " + pm.gen(f"step {index}")


Work = Callable[[TokenBackend, bool], Any]


@dataclass(frozen=True)
class Sizes:
    """How much work."""

    width: int = 8
    programs: int = 48
    new_tokens: int = 32
    rounds: int = 21

    @property
    def options(self) -> dict[str, Any]:
        """Those of every run."""
        return {"max_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}

    def fork(self, backend: TokenBackend, trace: bool) -> Any:
        """One program that forks."""
        return think.run("A lamp", self.width, backend=backend, trace=trace, **self.options)

    def batch(self, backend: TokenBackend, trace: bool) -> Any:
        """Many programs at once."""
        numbers = list(range(self.programs))
        return ask.run_batch(numbers, backend=backend, trace=trace, **self.options)


def timed(work: Work, backend: TokenBackend, trace: bool) -> float:
    """Seconds."""
    backend.flush_cache()
    gc.collect()
    start = time.perf_counter()
    work(backend, trace)
    return time.perf_counter() - start


def sure_place(count: int) -> int:
    """The place, among so many numbers in order, of one that the median of all there could be lies
    below with a probability of 2.5 % at most (that of as few heads among fair coins); or the first.
    """
    share, place = 0.5**count, 0
    while share <= 0.025:
        place += 1
        share += math.comb(count, place) * 0.5**count
    return max(0, place - 1)


def compare(name: str, work: Work, backend: TokenBackend, rounds: int) -> float:
    """Print the medians; the median ratio."""
    timed(work, backend, True)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for trace in (False, True) if number % 2 else (True, False):
            times[trace].append(timed(work, backend, trace))
    ratios = sorted(b / a for a, b in zip(times[False], times[True], strict=True))
    ratio = statistics.median(ratios)
    first = sure_place(rounds)
    print(
        f"{name:28}{statistics.median(times[False]):8.3f} s without"
        f"{statistics.median(times[True]):8.3f} s with trace=True   ratio {ratio:.4f}"
        f" (95 %: {ratios[first]:.4f} to {ratios[-1 - first]:.4f}; {rounds} pairs)",
        flush=True,
    )
    return ratio


@contextmanager
def clocked(totals: list[float]) -> Iterator[None]:
    """Seconds that threads are within methods of the records are appended to `totals`."""
    local = threading.local()

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(local, "is_within", False):
                return method(*args, **kwargs)
            local.is_within = True
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                totals.append(time.perf_counter() - start)
                local.is_within = False

        return timed

    kept = [
        (record, name, method)
        for record in (RunRecord, BranchRecord, EventRecord, AskRecord)
        for name, method in vars(record).items()
        if inspect.isfunction(method)
    ]
    for record, name, method in kept:
        setattr(record, name, around(method))
    try:
        yield
    finally:
        for record, name, method in kept:
            setattr(record, name, method)


def share_of_recording(name: str, work: Work, backend: TokenBackend, rounds: int) -> float:
    """Print what is recorded in every run, as a share of its time; the median."""
    shares = []
    for _ in range(rounds):
        totals: list[float] = []
        with clocked(totals):
            seconds = timed(work, backend, False)
        shares.append(sum(totals) / seconds)
    share = statistics.median(shares)
    print(
        f"{name:28}{share:8.2%} of its time is recording what every run records "
        f"({min(shares):.2%} to {max(shares):.2%})",
        flush=True,
    )
    return share


def scripted() -> pm.ScriptedBackend:
    """Some words each time, of which each token has likelier ones beside it."""
    words = ["a", "lamp", "that", "turns", "off", "by", "itself", "when", "one", "sleeps", "sun"]
    tokenizer = pm.ByteTokenizer([f" {word}" for word in words])
    ids = [tokenizer.single_id(f" {word}") for word in words]
    rng = random.Random(1)

    def answer(prompt: str, request: Request) -> pm.Reply:
        return pm.Reply(token_ids=tuple(rng.choices(ids, k=16)), num_forced=4)

    shares: dict[str | bytes | int, float] = {f" {word}": 1 / len(words) for word in words}
    return pm.ScriptedBackend(answer, tokenizer=tokenizer, probabilities={"": shares})


def export(num_primitives: int) -> None:
    """Print what a long trace takes."""
    count = 50
    backend = scripted()
    cases = [{"number": index, "count": count} for index in range(num_primitives // count)]
    sizes = {}
    for trace in (False, True):
        gc.collect()
        tracemalloc.start()
        states = steps.run_batch(cases, backend=backend, trace=trace, num_threads=8)
        backend.requests.clear()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for state in states:  # the records alone
            state._branch.record.events.clear()
            del state._branch.record.ids[:]
        gc.collect()
        sizes[trace] = before - tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    states = steps.run_batch(cases, backend=backend, trace=True, num_threads=8)
    start = time.perf_counter()
    trace_taken = pm.Trace.of(states)
    taken = time.perf_counter()
    text = trace_taken.to_json()
    written = time.perf_counter()
    pm.Trace.from_json(text)
    read = time.perf_counter()
    page = trace_taken.html()
    made = sum(1 for _ in trace_taken.events())
    print(
        f"{made} primitives: taken in {taken - start:.2f} s, written in {written - taken:.2f} s "
        f"({len(text) / 1e6:.1f} MB of JSON, {len(page) / 1e6:.1f} MB as a page), read and checked "
        f"in {read - written:.2f} s"
    )
    print(
        f"records in memory: {sizes[False] / made:.0f} bytes per primitive, "
        f"{sizes[True] / made:.0f} with trace=True (8 generated tokens per primitive)"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--quick", action="store_true", help="little of each, for no figures")
    args = parser.parse_args(arguments)
    sizes = Sizes(width=2, programs=3, new_tokens=4, rounds=1) if args.quick else Sizes()
    rounds = 1 if args.quick else args.rounds
    export(200 if args.quick else GOAL_PRIMITIVES)
    one, many = f"a program of {sizes.width} branches", f"a batch of {sizes.programs}"
    with pm.Engine(args.model) as engine:
        ratios = [
            compare(one, sizes.fork, engine, 2 * rounds),
            compare(many, sizes.batch, engine, rounds),
            1 + share_of_recording(one, sizes.fork, engine, rounds),
            1 + share_of_recording(many, sizes.batch, engine, rounds),
        ]
    print(f"goal: a ratio of at most {GOAL_RATIO}")
    if max(ratios) > GOAL_RATIO and not args.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
