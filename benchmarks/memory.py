"""Whether an engine grows while it serves: its resident size over many requests of every kind.

Short random prompts, some behind shared prefixes, some constrained by one of 200 patterns (more
than are remembered compiled), some with log-probabilities, some cancelled on their way, some that
are scored. The resident size is read every so many requests; over the second half, when every cache
is full, a straight line is fitted. Its interval is at 95 % and allows for samples that follow from
the ones before (Newey and West, Econometrica 55, 1987).

    OMP_NUM_THREADS=2 python -m benchmarks.memory --requests 20000 --plot docs/plots/memory.svg

With `--trace` it tells which lines of Python hold more at the end than in the middle. That makes it
slow.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import resource
import string
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plotting import svg_figure
from palmette.errors import RequestAborted
from palmette.protocol import Constraint, Request, SamplingParams, ScoreRequest, TokenEvent
from palmette.runtime.engine import Engine, Event

KINDS = ("plain", "shared", "regex", "logprobs", "cancelled", "score")
_WEIGHTS = (40, 20, 12, 10, 8, 10)
_PATTERNS = (r"[0-9]{1,3}", r"(yes|no)", r"[a-z]+( [a-z]+)?", r"\d\d:\d\d", r"[A-Z][a-z]{1,8}")
_NUM_PATTERNS = 200


def resident_kib() -> float:
    """Of this process now; where the system does not tell, the most it ever was."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 1024 if sys.platform == "darwin" else most


class Requests:
    """Requests of every kind, the same for a seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._rng = random.Random(seed)
        self._encode = engine.tokenizer.encode
        self._vocab_size = engine.tokenizer.vocab_size
        self._prefixes = [self._tokens(40) for _ in range(8)]
        self._patterns = [*_PATTERNS]
        while len(self._patterns) < _NUM_PATTERNS:
            letters = "".join(self._rng.sample(string.ascii_lowercase, 5))
            self._patterns.append(f"[{letters}]{{1,{self._rng.randint(2, 4)}}}-[0-9]{{2}}")
        self._num_made = 0

    def next(self) -> tuple[str, Request | ScoreRequest]:
        """A kind, and a request of that kind."""
        rng = self._rng
        self._num_made += 1
        (kind,) = rng.choices(KINDS, _WEIGHTS)
        name = f"{kind}-{self._num_made}"
        prompt = self._tokens(rng.randint(8, 60))
        if kind == "shared":
            prompt = rng.choice(self._prefixes) + prompt[:20]
        if kind == "score":
            options = tuple(tuple(self._tokens(rng.randint(1, 3))) for _ in range(3))
            return kind, ScoreRequest(
                request_id=name, token_ids=tuple(prompt), continuations=options
            )
        num_new = rng.randint(2, 6)
        constraint = None
        if kind == "regex":
            constraint = Constraint.regex(rng.choice(self._patterns))
            num_new = 12  # room for a whole text
        sampling = SamplingParams(
            max_tokens=num_new,
            ignore_eos=kind != "regex",
            seed=self._num_made,
            logprobs=3 if kind == "logprobs" else None,
        )
        return kind, Request(
            request_id=name, token_ids=tuple(prompt), sampling=sampling, constraint=constraint
        )

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class Sample:
    """How large the process was after so many requests."""

    num_requests: int
    kib: float


@dataclass(frozen=True, slots=True)
class Line:
    """Growth in KiB per 1,000 requests, and how far it may be from the truth, at 95 %."""

    slope: float
    uncertainty: float

    @property
    def is_flat(self) -> bool:
        """Whether no growth at all is within the interval."""
        return self.slope - self.uncertainty <= 0


@dataclass(slots=True)
class Figures:
    samples: list[Sample] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)  # by kind
    seconds: float = 0.0
    grown: list[str] = field(default_factory=list)  # where traced memory grew

    @property
    def second_half(self) -> list[Sample]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def line(self) -> Line | None:
        """Of the second half; None while it has fewer than four samples."""
        half = self.second_half
        if len(half) < 4:
            return None
        return fit([s.num_requests / 1000 for s in half], [s.kib for s in half])


def fit(xs: list[float], ys: list[float]) -> Line:
    """The least-squares line through at least three points, with Newey and West's variance."""
    x, y = np.array(xs) - np.mean(xs), np.array(ys) - np.mean(ys)
    spread = float(x @ x)
    slope = float(x @ y) / spread
    moments = x * (y - slope * x)
    num_lags = int(4 * (len(x) / 100) ** (2 / 9)) + 1
    total = float(moments @ moments)
    for lag in range(1, min(num_lags, len(x) - 1) + 1):
        weight = 1 - lag / (num_lags + 1)
        total += 2 * weight * float(moments[lag:] @ moments[:-lag])
    variance = max(total, 0.0) * len(x) / (len(x) - 2) / spread**2
    return Line(slope, 1.96 * variance**0.5)


class Client:
    """Keeps `num_live` requests under way until enough have ended."""

    def __init__(self, engine: Engine, requests: Requests, num_live: int, figures: Figures) -> None:
        self._engine = engine
        self._requests = requests
        self._num_live = num_live
        self._figures = figures
        self._kinds: dict[str, str] = {}

    def serve(self, num_requests: int, every: int, note: Callable[[int], None]) -> None:
        """`note` is called with how many have ended, each time `every` more have.

        As many are under way to the end; those left over are given up.
        """
        num_ended = 0
        while num_ended < num_requests:
            while len(self._kinds) < self._num_live:
                kind, request = self._requests.next()
                self._kinds[request.request_id] = kind
                self._engine.submit(request)
            for event in self._engine.step():
                if self._is_end(event):
                    num_ended += 1
                    if num_ended % every == 0:
                        note(num_ended)
        for request_id in self._kinds:
            self._engine.abort(request_id)

    def _is_end(self, event: Event) -> bool:
        if event.error is not None and not isinstance(event.error, RequestAborted):
            raise event.error
        if isinstance(event, TokenEvent) and event.finish_reason is None:
            kind = self._kinds.get(event.request_id)
            if kind == "cancelled":
                self._engine.abort(event.request_id)
            return False
        kind = self._kinds.pop(event.request_id)
        self._figures.ended[kind] = self._figures.ended.get(kind, 0) + 1
        return True


def measure(
    engine: Engine,
    *,
    num_requests: int,
    num_live: int,
    every: int,
    seed: int,
    trace: bool,
    figures: Figures,
    say: Callable[[str], None],
) -> None:
    """Fill `figures`."""
    begin = time.monotonic()
    middle: list[tracemalloc.Snapshot] = []

    def note(num_ended: int) -> None:
        gc.collect()  # what is garbage is no growth
        figures.samples.append(Sample(num_ended, resident_kib()))
        figures.seconds = time.monotonic() - begin
        if num_ended % (5 * every) == 0:
            say(f"{num_ended:,} requests, {figures.samples[-1].kib / 1024:.1f} MiB")
        if trace and not middle and num_ended >= num_requests // 2:
            middle.append(tracemalloc.take_snapshot())

    if trace:
        tracemalloc.start(8)
    client = Client(engine, Requests(engine, seed), num_live, figures)
    try:
        client.serve(num_requests, every, note)
    finally:
        if trace:
            if middle:
                found = tracemalloc.take_snapshot().compare_to(middle[0], "lineno")
                figures.grown = [str(line) for line in found[:15]]
            tracemalloc.stop()


def report(figures: Figures, dtype: str) -> None:
    num_ended = sum(figures.ended.values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(figures.ended.items()))
    print(f"{num_ended:,} requests in {figures.seconds:.0f} s ({kinds}); {dtype}")
    if not figures.samples:
        return
    print(f"\n{'requests':>10}{'resident, MiB':>15}")
    step = max(1, len(figures.samples) // 10)
    for sample in figures.samples[step - 1 :: step]:
        print(f"{sample.num_requests:>10,}{sample.kib / 1024:>15.1f}")
    line = figures.line
    if line is not None:
        flat = "flat" if line.is_flat else "growing"
        print(
            f"\nsecond half: {line.slope:+.1f} +- {line.uncertainty:.1f} KiB per 1,000 requests "
            f"(95 %): {flat}"
        )
    for place in figures.grown:
        print(f"  {place}")


def plot(figures: Figures, path: Path) -> None:
    """Resident size over requests, with the line. The same figures give the same file."""
    with svg_figure(path, 1, 1, (6, 3)) as ((axes,),):
        xs = [sample.num_requests for sample in figures.samples]
        axes.plot(xs, [sample.kib / 1024 for sample in figures.samples], linewidth=1)
        line, half = figures.line, figures.second_half
        if line is not None:
            at = [sample.num_requests for sample in half]
            mean = sum(sample.kib for sample in half) / len(half)
            middle = sum(at) / len(at)
            ends = [at[0], at[-1]]
            axes.plot(
                ends,
                [(mean + line.slope * (x - middle) / 1000) / 1024 for x in ends],
                linestyle="--",
                label=f"{line.slope:+.1f} ± {line.uncertainty:.1f} KiB per 1,000 requests",
            )
            axes.legend()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests")
        axes.set_ylabel("resident, MiB")
        axes.grid(visible=True, linewidth=0.3)


def as_dict(figures: Figures) -> dict[str, Any]:
    return {
        **asdict(figures),
        "line": asdict(figures.line) if figures.line is not None else None,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=32, help="requests under way at any time")
    parser.add_argument("--every", type=int, default=200, help="requests between two samples")
    parser.add_argument("--kv-memory", type=int, default=128 << 20, help="bytes of the KV pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="tell where Python memory grew")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="plot the sizes to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)

    def say(what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)

    engine = Engine(args.model, dtype=args.dtype, kv_memory=args.kv_memory)
    figures = Figures()
    try:
        measure(
            engine,
            num_requests=args.requests,
            num_live=args.batch,
            every=args.every,
            seed=args.seed,
            trace=args.trace,
            figures=figures,
            say=say,
        )
    except KeyboardInterrupt:
        say("interrupted: what follows is not complete")
    report(figures, f"{engine.dtype_name}, {platform.machine()}")
    if args.plot:
        plot(figures, args.plot)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_dict(figures), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
