"""Many branches of one program, and many programs in a batch, all under way at the same time.

2,000 branches of one program, and 500 programs in `run_batch`, as plain functions and as `async
def`, on a backend that answers from a script and on an engine with a model. For each: how many
generations the backend had at once, the most threads of the process, its memory, the time, and
whether the answers are those of the same work done one after the other.

    OMP_NUM_THREADS=2 python -m benchmarks.branches
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import palmette as pm
from palmette.protocol import Outlook, Request, TokenBackend, TokenEvent
from palmette.runtime.async_engine import AsyncEngine

BEGINNING = "Below are questions about numbers, each with a short answer.\n"
SAMPLE_SECONDS = 0.02
SETTLE_SECONDS = 0.3  # for the threads of the last batch to end


def question(number: int) -> str:
    return f"Question {number}: what comes after {number}?\nAnswer:"


@pm.function
def branches_at_once(s: pm.State, num: int) -> list[str]:
    s += BEGINNING
    branches = s.fork(num)
    branches += lambda i: question(i) + pm.gen("answer")
    branches.join()
    return list(s["answer"])


@pm.function
def branches_in_turn(s: pm.State, num: int) -> list[str]:
    s += BEGINNING
    answers = []
    for number in range(num):
        (branch,) = s.fork(1)
        branch += question(number) + pm.gen("answer")
        answers.append(branch["answer"])
    return answers


@pm.function
def ask(s: pm.State, number: int) -> None:
    s += BEGINNING + question(number) + pm.gen("answer")
    s["length"] = len(s["answer"])  # reads, and so holds its thread until the answer is there


@pm.function
async def ask_async(s: pm.State, number: int) -> None:
    s += BEGINNING + question(number) + pm.gen("answer")
    s["length"] = len(await s.value("answer"))


class Counting:
    """A backend that knows how many generations were under way at most."""

    def __init__(self, backend: TokenBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._num_running = 0
        self.max_running = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        """Handed on to an engine; a script has nothing to plan."""
        if isinstance(self._backend, AsyncEngine):
            self._backend.announce(outlook, ended)

    def end_program(self, program_id: str) -> None:
        """As `announce`."""
        if isinstance(self._backend, AsyncEngine):
            self._backend.end_program(program_id)

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """What the backend generates, counted while it does."""
        with self._counted():
            async with aclosing(cast("Any", self._backend.generate(request))) as events:
                async for event in events:
                    yield event

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1


def in_process(field: str) -> int:
    """A field of /proc/self/status (Linux): threads of all kinds, or KiB that are resident."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1])


class Watch:
    """Looks at the process from a thread of its own, which is not counted."""

    def __init__(self) -> None:
        self.threads_before = in_process("Threads")
        self.mib_before = in_process("VmRSS") / 1024
        self.max_threads, self.max_mib = self.threads_before, self.mib_before
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.max_threads = max(self.max_threads, in_process("Threads") - 1)
            self.max_mib = max(self.max_mib, in_process("VmRSS") / 1024)


@dataclass(frozen=True)
class Figures:
    """Of one way to do the work, all at once, and of the same work in turn."""

    name: str
    max_running: int
    watch: Watch
    seconds: float
    seconds_in_turn: float
    is_same: bool

    def told(self) -> str:
        watch = self.watch
        return (
            f"{self.name:32}{self.max_running:6} at once"
            f"{watch.threads_before:5} to {watch.max_threads:3} threads"
            f"{watch.mib_before:7.0f} to {watch.max_mib:5.0f} MiB"
            f"{self.seconds:8.2f} s{self.seconds_in_turn:9.2f} s in turn"
            f"   answers {'equal' if self.is_same else 'DIFFER'}"
        )


Work = Callable[[TokenBackend], list[str]]


@dataclass(frozen=True)
class Sizes:
    """How many, and how many tokens each."""

    num_branches: int = 2_000
    num_programs: int = 500
    num_new: int = 4

    @property
    def options(self) -> dict[str, Any]:
        """Those of every run."""
        return {"max_tokens": self.num_new, "temperature": 0, "ignore_eos": True}

    def branches(self, program: pm.Function) -> Work:
        """One run of a program that forks."""
        num = self.num_branches
        return lambda backend: list(program.run(num, backend=backend, **self.options).ret_value)

    def batch(self, program: pm.Function) -> Work:
        """All programs in a batch."""
        numbers = list(range(self.num_programs))
        return lambda backend: [
            state["answer"] for state in program.run_batch(numbers, backend=backend, **self.options)
        ]

    def one_by_one(self, backend: TokenBackend) -> list[str]:
        """All programs, the next begun when the last has ended."""
        runs = (ask.run(i, backend=backend, **self.options) for i in range(self.num_programs))
        return [state["answer"] for state in runs]


def timed(work: Work, backend: TokenBackend) -> tuple[float, list[str]]:
    """Seconds and answers."""
    start = time.perf_counter()
    answers = work(backend)
    return time.perf_counter() - start, answers


def measure(kind: str, backend: TokenBackend, sizes: Sizes) -> Iterator[Figures]:
    """Branches, plain programs and async ones. The cache is flushed before each."""
    ways = {
        "branches": (sizes.branches(branches_in_turn), {"": sizes.branches(branches_at_once)}),
        "programs": (
            sizes.one_by_one,
            {"plain ": sizes.batch(ask), "async ": sizes.batch(ask_async)},
        ),
    }
    for what, (in_turn, at_once) in ways.items():
        backend.flush_cache()
        seconds_in_turn, expected = timed(in_turn, backend)
        for how, work in at_once.items():
            backend.flush_cache()
            counting = Counting(backend)
            time.sleep(SETTLE_SECONDS)
            with Watch() as watch:
                seconds, answers = timed(work, cast("TokenBackend", counting))
            num = sizes.num_branches if what == "branches" else sizes.num_programs
            yield Figures(
                name=f"{kind}, {num} {how}{what}",
                max_running=counting.max_running,
                watch=watch,
                seconds=seconds,
                seconds_in_turn=seconds_in_turn,
                is_same=answers == expected,
            )


def scripted() -> pm.ScriptedBackend:
    """Answers with the number asked about, after a short while."""

    def answer(prompt: str, request: Request) -> str:
        return prompt.rpartition("after ")[2].partition("?")[0]

    return pm.ScriptedBackend(answer, delay=0.01)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--branches", type=int, default=Sizes.num_branches)
    parser.add_argument("--programs", type=int, default=Sizes.num_programs)
    parser.add_argument("--new-tokens", type=int, default=Sizes.num_new)
    return parser.parse_args(arguments)


def report(kind: str, backend: TokenBackend, sizes: Sizes) -> bool:
    """Print the figures as they come; whether all answers were equal."""
    is_same = True
    for figures in measure(kind, backend, sizes):
        print(figures.told(), flush=True)
        is_same = is_same and figures.is_same
    return is_same


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    sizes = Sizes(args.branches, args.programs, args.new_tokens)
    is_same = report("script", scripted(), sizes)
    with pm.Engine(args.model) as engine:
        is_same = report(args.model, engine, sizes) and is_same
    if not is_same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
