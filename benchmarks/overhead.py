"""What the prefix tree and the scheduler cost where nothing is shared, as a share of the run.

100 requests with long-tailed prompt and output lengths, as conversations have them (log-normal, in
proportion to a small model: medians of 60 and 40 tokens), all at once, of random tokens, so that
no two begin alike. Two measurements, in turns:

- The time inside the methods of scheduler, queue and KV manager, as they are entered from outside,
  against the whole run. A further run with a clock around every method says where the time goes;
  each clock costs some tenths of a microsecond, so its parts add up to more.
- Without any clock: the whole run with the prefix cache against the whole run without it.

    OMP_NUM_THREADS=2 python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palmette.protocol import Request, SamplingParams
from palmette.radix_cache import Lease, RadixCache
from palmette.runtime.engine import Engine
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.kv.prefixes import PrefixStore
from palmette.runtime.scheduler import Scheduler
from palmette.runtime.scheduler import queue as queues
from palmette.runtime.scheduler.programs import Programs

GOAL_SHARE = 0.003

# What the engine and the worker call: the whole of the work is done inside these.
ENTRIES: tuple[type, ...] = (Scheduler, Programs, KVManager, PrefixStore)
# Where it is done, for the table of parts.
PARTS: tuple[type, ...] = (
    *ENTRIES,
    queues.DepthFirst,
    queues.LongestPrefixMatch,
    queues.FirstComeFirstServed,
    RadixCache,
    Lease,
)
# Over in less time than a clock takes: it would measure itself.
_NOT_TIMED = {"num_pages_for", "next_use", "deliver_events", "node"}


@dataclass(slots=True)
class Part:
    """One method: its calls, and the seconds in it but for the timed methods that it called."""

    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Stopwatch:
    """Seconds in timed methods. `total` counts the outermost of nested calls only."""

    total: float = 0.0
    parts: dict[str, Part] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)  # of each call under way, in timed calls

    def around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        part = self.parts.setdefault(name, Part())
        inner = self._inner
        clock = time.perf_counter

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = clock() - start
                part.calls += 1
                part.seconds += seconds - inner.pop()
                if inner:
                    inner[-1] += seconds
                else:
                    self.total += seconds

        return timed


@contextmanager
def clocks_on(classes: tuple[type, ...]) -> Iterator[Stopwatch]:
    """A clock around every public method of the classes, until the end of the block."""
    watch = Stopwatch()
    with ExitStack() as undo:
        for owner in classes:
            for name, method in list(vars(owner).items()):
                if name.startswith("_") or name in _NOT_TIMED or not inspect.isfunction(method):
                    continue
                undo.callback(setattr, owner, name, method)
                setattr(owner, name, watch.around(f"{owner.__name__}.{name}", method))
        yield watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests whose first tokens all differ."""

    requests: tuple[Request, ...]

    @classmethod
    def of(cls, num_requests: int, vocab_size: int, seed: int, scale: float = 1.0) -> Load:
        """Lengths are log-normal; `scale` multiplies them."""
        rng = random.Random(seed)
        if num_requests > vocab_size:
            raise ValueError(f"{num_requests} requests need as many different first tokens")
        firsts = rng.sample(range(vocab_size), num_requests)
        requests = []
        for index, first in enumerate(firsts):
            num_prompt = _length(rng, scale, median=60, sigma=1.1, low=4, high=700)
            num_output = _length(rng, scale, median=40, sigma=0.8, low=2, high=200)
            rest = [rng.randrange(vocab_size) for _ in range(num_prompt - 1)]
            sampling = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=index)
            requests.append(
                Request(request_id=str(index), token_ids=(first, *rest), sampling=sampling)
            )
        return cls(requests=tuple(requests))

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(request.token_ids) for request in self.requests]

    @property
    def output_lengths(self) -> list[int]:
        return [request.sampling.max_tokens for request in self.requests]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its output included."""
        return max(map(sum, zip(self.prompt_lengths, self.output_lengths, strict=True)))


def _length(
    rng: random.Random, scale: float, *, median: float, sigma: float, low: int, high: int
) -> int:
    drawn = scale * median * rng.lognormvariate(0.0, sigma)
    return max(low, min(round(drawn), max(low, round(scale * high))))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the whole load."""

    seconds: float
    steps: int
    managing: float  # seconds in tree and scheduler; 0 where there was no clock
    parts: dict[str, Part]

    @property
    def share(self) -> float:
        return self.managing / self.seconds


def run(engine: Engine, load: Load, classes: tuple[type, ...] = ()) -> Run:
    """All requests at once, from an empty cache, with clocks on the methods of `classes`."""
    engine.flush_cache()
    before = engine.stats()
    with clocks_on(classes) as watch:
        start = time.perf_counter()
        for request in load.requests:
            engine.submit(request)
        while engine.has_work:
            for event in engine.step():
                if event.error is not None:
                    raise event.error
        seconds = time.perf_counter() - start
    counted = engine.stats().since(before)
    if counted.cached_tokens:
        raise RuntimeError(f"{counted.cached_tokens} tokens were cached; none are shared")
    return Run(seconds, counted.steps, watch.total, watch.parts)


@dataclass(slots=True)
class Figures:
    """Every run so far, by how it was made."""

    measured: list[Run] = field(default_factory=list)
    cached: list[Run] = field(default_factory=list)
    uncached: list[Run] = field(default_factory=list)
    in_parts: Run | None = None

    @property
    def share(self) -> float | None:
        return statistics.median(r.share for r in self.measured) if self.measured else None

    @property
    def ratios(self) -> list[float]:
        """With the cache against without it, round by round."""
        return [a.seconds / b.seconds for a, b in zip(self.cached, self.uncached, strict=False)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "ratios": self.ratios,
            "measured": [asdict(r) for r in self.measured],
            "seconds_with_cache": [r.seconds for r in self.cached],
            "seconds_without_cache": [r.seconds for r in self.uncached],
            "in_parts": asdict(self.in_parts) if self.in_parts else None,
        }


def measure(
    cached: Engine,
    uncached: Engine,
    load: Load,
    rounds: int,
    figures: Figures,
    say: Callable[[str], None],
) -> None:
    """Fill `figures`: `rounds` rounds of three runs in turns, then one in parts."""
    for number in range(1, rounds + 1):
        figures.measured.append(run(cached, load, ENTRIES))
        say(f"round {number}, timed: {figures.measured[-1].seconds:.1f} s")
        # Whoever runs second may find a warmer or busier machine: they change places.
        pair = [(cached, figures.cached), (uncached, figures.uncached)]
        for engine, runs in pair if number % 2 else reversed(pair):
            runs.append(run(engine, load))
            which = "with" if engine is cached else "without"
            say(f"round {number}, {which} cache: {runs[-1].seconds:.1f} s")
    figures.in_parts = run(cached, load, PARTS)


def report(figures: Figures, load: Load, dtype: str) -> None:
    prompts, outputs = load.prompt_lengths, load.output_lengths
    print(
        f"{len(load.requests)} requests, nothing shared; {dtype}, {platform.machine()}\n"
        f"prompts {sum(prompts):,} tokens (median {statistics.median(prompts):.0f}, at most "
        f"{max(prompts)}), outputs {sum(outputs):,} (median {statistics.median(outputs):.0f}, at "
        f"most {max(outputs)})"
    )
    if figures.share is None:
        return
    steps = statistics.median(r.steps for r in figures.measured)
    seconds = statistics.median(r.seconds for r in figures.measured)
    managing = statistics.median(r.managing for r in figures.measured)
    print(
        f"\n{steps:.0f} steps in {seconds:.2f} s: {1e3 * seconds / steps:.1f} ms for a step, of "
        f"which tree and scheduler {1e6 * managing / steps:.0f} us"
    )
    is_met = "met" if figures.share < GOAL_SHARE else "NOT MET"
    print(
        f"share of tree and scheduler {figures.share:.3%} (goal: below {GOAL_SHARE:.1%}, {is_met})"
    )
    if figures.ratios:
        print(
            f"whole run with the prefix cache / without it: "
            f"{statistics.median(figures.ratios):.4f}"
            f" (rounds: {', '.join(f'{r:.4f}' for r in figures.ratios)})"
        )
    if figures.in_parts is not None:
        report_parts(figures.in_parts)


def report_parts(one: Run) -> None:
    print(f"\n{'where it goes':<34}{'calls/step':>11}{'us/call':>9}{'us/step':>9}{'share':>9}")
    parts = sorted(one.parts.items(), key=lambda entry: -entry[1].seconds)
    for name, part in parts:
        if part.calls:
            print(
                f"{name:<34}{part.calls / one.steps:>11.2f}{1e6 * part.seconds / part.calls:>9.2f}"
                f"{1e6 * part.seconds / one.steps:>9.1f}{part.seconds / one.seconds:>9.4%}"
            )
    print(f"{'in all, clocks included':<54}{1e6 * one.managing / one.steps:>9.1f}{one.share:>9.4%}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--scale", type=float, default=1.0, help="of every length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", default="program", choices=["program", "lpm", "fcfs"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)

    from palmette.runtime.config import EngineConfig
    from palmette.runtime.loading import load_model
    from palmette.runtime.loading.registry import resolve_model
    from palmette.runtime.tokenization import load_tokenizer

    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, args.dtype), load_tokenizer(path)
    load = Load.of(args.requests, tokenizer.vocab_size, args.seed, args.scale)
    num_pages = 4096 + -(-load.longest // 16)

    def engine(*, prefix_cache: bool) -> Engine:
        config = EngineConfig.of(
            {"prefix_cache": prefix_cache, "policy": args.policy, "num_pages": num_pages}
        )
        return Engine.assemble(args.model, loaded, tokenizer, config)

    def say(what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)

    figures = Figures()
    try:
        cached, uncached = engine(prefix_cache=True), engine(prefix_cache=False)
        warm = Load.of(8, tokenizer.vocab_size, args.seed + 1, 0.2)
        run(cached, warm)
        run(uncached, warm)
        measure(cached, uncached, load, args.rounds, figures, say)
    except KeyboardInterrupt:
        say("interrupted: what follows is not complete")
    report(figures, load, str(loaded.dtype).removeprefix("torch."))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures.as_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
