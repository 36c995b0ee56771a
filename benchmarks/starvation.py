"""Hot traffic at saturation, and now and then somebody with a prompt that nobody shares.

Clients that always have a next request ready ask short questions behind a few shared prefixes, so
that the queue stays as deep as it is. From a third of the time on, cold requests come in; the last
one of them is long. The same load under three orders of the queue:

- `program`: the default, with its bound on waiting,
- `lpm`: longest cached prefix first, with the same bound,
- pure lpm: longest cached prefix first and nothing else; cold requests starve.

Tells how long cold requests waited for admission against the bound, the hit rate over as many
requests in each order, and the throughput. One client streams a long answer all the while: the
largest gap between two of its tokens, and the largest while the long prompt was prefilled. The same
gaps without any traffic follow, for several bounds of a step.

    OMP_NUM_THREADS=2 python -m benchmarks.starvation --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from palmette.protocol import FinishReason, Request, SamplingParams, TokenEvent
from palmette.runtime.config import EngineOptions, PolicyName
from palmette.runtime.engine import Engine

GOAL_POINTS = 0.02

MakeEngine = Callable[[EngineOptions], Engine]
"""A fresh engine with an empty cache, on the clock of the measurement."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The load. Lengths in tokens."""

    seconds: float = 60.0
    max_wait: float = 5.0
    num_hot: int = 8  # prefixes
    hot_tokens: int = 200
    question_tokens: int = 16
    max_new_tokens: int = 8
    depth: int = 48  # requests under way, of which `max_running` at most run
    max_running: int = 16
    pool_tokens: int = 8_192
    num_cold: int = 5
    cold_tokens: int = 100
    long_tokens: int = 1_500
    stream_tokens: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How those that wait are ordered."""

    name: str
    policy: PolicyName
    is_bounded: bool


ORDERS = (
    Order(name="program", policy="program", is_bounded=True),
    Order(name="lpm", policy="lpm", is_bounded=True),
    Order(name="pure lpm", policy="lpm", is_bounded=False),
)


class Traffic:
    """The requests of a setting, the same for every engine: by kind and number."""

    def __init__(self, setting: Setting, vocab_size: int) -> None:
        self._setting = setting
        self._vocab_size = vocab_size
        rng = random.Random(setting.seed)
        self._prefixes = [self._tokens(rng, setting.hot_tokens) for _ in range(setting.num_hot)]

    def hot(self, number: int) -> Request:
        rng = self._rng("hot", number)
        question = self._tokens(rng, self._setting.question_tokens)
        num_new = rng.randint(
            max(1, self._setting.max_new_tokens // 2), self._setting.max_new_tokens
        )
        return self._request(f"hot-{number}", rng.choice(self._prefixes) + question, num_new)

    def cold(self, number: int) -> Request:
        is_long = number == self._setting.num_cold - 1
        num_tokens = self._setting.long_tokens if is_long else self._setting.cold_tokens
        tokens = self._tokens(self._rng("cold", number), num_tokens)
        return self._request(f"long-{number}" if is_long else f"cold-{number}", tokens, 4)

    def stream(self, number: int) -> Request:
        tokens = self._tokens(self._rng("stream", number), 8)
        return self._request(f"stream-{number}", tokens, self._setting.stream_tokens)

    def _request(self, name: str, token_ids: list[int], num_new: int) -> Request:
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0)
        return Request(request_id=name, token_ids=tuple(token_ids), sampling=sampling)

    def _rng(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self._setting.seed} {kind} {number}")

    def _tokens(self, rng: random.Random, num_tokens: int) -> list[int]:
        return [rng.randrange(self._vocab_size) for _ in range(num_tokens)]


@dataclass(slots=True, kw_only=True)
class Cold:
    """What became of one cold request. Times in seconds."""

    request_id: str
    submitted_at: float
    wait: float = math.nan  # until admission; if it never was, so far
    is_admitted: bool = False
    first_token: float = math.nan  # from submission


@dataclass(slots=True)
class Outcome:
    """What was seen under one order."""

    order: str
    seconds: float = 0.0
    num_tokens: int = 0  # generated
    # (cached tokens, tokens of the prompt, whether hot), in the order in which they ended
    hits: list[tuple[int, int, bool]] = field(default_factory=list)
    cold: list[Cold] = field(default_factory=list)
    hot_waits: list[float] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # (began, ended)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # of the stream: (from, to)
    max_waiting: int = 0
    min_waiting: int = 1 << 30

    @property
    def longest_step(self) -> float:
        return max((end - start for start, end in self.steps), default=0.0)

    @property
    def longest_wait(self) -> float:
        return max((c.wait for c in self.cold if not math.isnan(c.wait)), default=math.nan)

    def num_steps_too_late(self, max_wait: float) -> int:
        """The most steps that were begun without a cold request although it was overdue."""
        most = 0
        for cold in self.cold:
            due, admitted = cold.submitted_at + max_wait, cold.submitted_at + cold.wait
            begun = sum(due < start < admitted for start, _ in self.steps)
            most = max(most, begun - cold.is_admitted)
        return most

    def num_starved(self, max_wait: float) -> int:
        """Cold requests that were not admitted though they waited longer than the bound."""
        return sum(not c.is_admitted and c.wait > max_wait for c in self.cold)

    def hit_rate(self, num_requests: int, *, hot_only: bool = False) -> float:
        """Of the first `num_requests` that ended."""
        counted = [hit for hit in self.hits[:num_requests] if hit[2] or not hot_only]
        return sum(cached for cached, *_ in counted) / max(1, sum(hit[1] for hit in counted))

    def largest_gap(self, *, in_prefill: bool) -> float:
        """Between two tokens of the stream: while the long prompt was prefilled, or else."""
        spans = [
            (c.submitted_at + c.wait, c.submitted_at + c.first_token)
            for c in self.cold
            if c.request_id.startswith("long") and c.is_admitted
        ]
        gaps = [
            end - start
            for start, end in self.gaps
            if any(start < last and end > first for first, last in spans) == in_prefill
        ]
        return max(gaps, default=math.nan)


class Session:
    """One engine under the traffic."""

    def __init__(
        self,
        engine: Engine,
        traffic: Traffic,
        setting: Setting,
        outcome: Outcome,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._traffic = traffic
        self._setting = setting
        self._outcome = outcome
        self._num_hot = self._num_cold = self._num_streams = 0
        self._num_live = 0  # hot ones
        self._streamed_at: float | None = None
        self._cold: dict[str, Cold] = {}
        self._prompts: dict[str, int] = {}
        first, last = setting.seconds / 3, setting.seconds * 0.7
        apart = (last - first) / max(1, setting.num_cold - 1)
        self._due = [first + index * apart for index in range(setting.num_cold)]

    def run(self, say: Callable[[str], None]) -> None:
        """Until the time is over; what is not finished then is dropped."""
        outcome, begin = self._outcome, self._clock()
        told = begin
        try:
            self._start_stream()
            while True:
                now = self._clock()
                if now - begin >= self._setting.seconds:
                    break
                if now - told >= 10:
                    told = now
                    say(f"{outcome.order}: {now - begin:.0f} s, {len(outcome.hits)} requests ended")
                self._top_up(now - begin)
                waiting = self._engine.stats().num_waiting
                outcome.max_waiting = max(outcome.max_waiting, waiting)
                start = self._clock()
                events = self._engine.step()
                end = self._clock()
                outcome.steps.append((start, end))
                if len(outcome.steps) > 3:
                    outcome.min_waiting = min(outcome.min_waiting, waiting)
                for event in events:
                    assert isinstance(event, TokenEvent)
                    self._take(event, end)
        finally:
            outcome.seconds = self._clock() - begin
            for request_id in list(self._cold):
                self._engine.abort(request_id)
            for event in self._engine.take_events():
                if isinstance(event, TokenEvent) and event.request_id in self._cold:
                    self._note_end(self._cold.pop(event.request_id), event)

    def _top_up(self, now: float) -> None:
        while self._num_live < self._setting.depth:
            self._engine.submit(self._traffic.hot(self._num_hot))
            self._num_hot += 1
            self._num_live += 1
        while self._due and now >= self._due[0]:
            self._due.pop(0)
            request = self._traffic.cold(self._num_cold)
            self._num_cold += 1
            cold = Cold(request_id=request.request_id, submitted_at=self._clock())
            self._cold[cold.request_id] = cold
            self._outcome.cold.append(cold)
            self._engine.submit(request)

    def _start_stream(self) -> None:
        self._streamed_at = None
        self._engine.submit(self._traffic.stream(self._num_streams))
        self._num_streams += 1

    def _take(self, event: TokenEvent, now: float) -> None:
        if event.error is not None:
            raise event.error
        outcome, name = self._outcome, event.request_id
        outcome.num_tokens += len(event.token_ids)
        if name.startswith("stream"):
            if event.token_ids:
                if self._streamed_at is not None:
                    outcome.gaps.append((self._streamed_at, now))
                self._streamed_at = now
            if event.finish_reason is not None:
                self._start_stream()
            return
        cold = self._cold.get(name)
        if cold is not None and math.isnan(cold.first_token):
            cold.first_token = now - cold.submitted_at
        if event.usage is None:
            return
        assert event.finish_reason is FinishReason.LENGTH
        usage = event.usage
        outcome.hits.append((usage.cached_tokens, usage.prompt_tokens, cold is None))
        if cold is None:
            outcome.hot_waits.append(usage.queued_seconds)
            self._num_live -= 1
        else:
            self._note_end(self._cold.pop(name), event)

    @staticmethod
    def _note_end(cold: Cold, event: TokenEvent) -> None:
        assert event.usage is not None
        cold.wait = event.usage.queued_seconds
        # Who never was admitted has been waiting from beginning to end.
        cold.is_admitted = event.usage.queued_seconds < event.usage.total_seconds


class StepBounds(NamedTuple):
    """Of a step's tokens, and of its seconds while others decode."""

    max_batch_tokens: int
    max_step_seconds: float | None


BOUNDS = (
    StepBounds(128, None),
    StepBounds(512, None),
    StepBounds(512, 0.2),
    StepBounds(512, 0.05),
    StepBounds(2_048, None),
)


@dataclass(slots=True, kw_only=True)
class Stall:
    """The gaps of a lonely stream while a long prompt comes in. Seconds."""

    bounds: StepBounds
    largest_gap_without: float
    largest_gap_during: float
    prefill: float  # from submission to the long one's first token


def measure_stall(
    make: MakeEngine, traffic: Traffic, setting: Setting, bounds: StepBounds, clock: Clock
) -> Stall:
    """Between its tokens before, and while the long prompt is prefilled, nobody else about."""
    engine = make(
        {
            "max_batch_tokens": bounds.max_batch_tokens,
            "max_step_seconds": bounds.max_step_seconds,
            "num_pages": -(-(setting.long_tokens + setting.stream_tokens + 200) // 16),
        }
    )
    engine.submit(traffic.stream(0))
    times: list[float] = []
    long = traffic.cold(setting.num_cold - 1)
    submitted = first_token = math.nan
    while engine.has_work and math.isnan(first_token):
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            if event.error is not None:
                raise event.error
            if event.request_id == long.request_id:
                if math.isnan(first_token):
                    first_token = clock()
            elif event.token_ids:
                times.append(clock())
                if len(times) == max(3, setting.stream_tokens // 4):
                    submitted = clock()
                    engine.submit(long)
    gaps = list(itertools.pairwise(times))
    during = [end - start for start, end in gaps if end > submitted]
    without = [end - start for start, end in gaps if end <= submitted]
    return Stall(
        bounds=bounds,
        largest_gap_without=max(without),
        largest_gap_during=max(during, default=math.nan),
        prefill=first_token - submitted,
    )


@dataclass(slots=True)
class Figures:
    """What was measured so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        """As many requests ended under every order."""
        return min((len(outcome.hits) for outcome in self.outcomes), default=0)


def measure(
    make: MakeEngine,
    traffic: Traffic,
    setting: Setting,
    figures: Figures,
    say: Callable[[str], None],
    step_bounds: tuple[StepBounds, ...] = BOUNDS,
    clock: Clock = time.monotonic,
) -> None:
    """Fill `figures`."""
    for order in ORDERS:
        options: EngineOptions = {
            "policy": order.policy,
            "max_wait": setting.max_wait if order.is_bounded else math.inf,
            "max_running": setting.max_running,
            "num_pages": -(-setting.pool_tokens // 16),
        }
        figures.outcomes.append(Outcome(order.name))
        Session(make(options), traffic, setting, figures.outcomes[-1], clock).run(say)
    for bounds in step_bounds:
        say(f"a long prompt beside a stream, steps of {_told(bounds)}")
        figures.stalls.append(measure_stall(make, traffic, setting, bounds, clock))


def _told(bounds: StepBounds) -> str:
    seconds = bounds.max_step_seconds
    time = "" if seconds is None else f", {1e3 * seconds:.0f} ms"
    return f"{bounds.max_batch_tokens:,} tokens{time}"


def lines(figures: Figures, setting: Setting) -> Iterator[str]:
    outcomes = [outcome for outcome in figures.outcomes if outcome.hits]
    if outcomes:
        yield (
            f"{'order':<10}{'cold waits, s':>38}{'starved':>9}{'steps late':>12}"
            f"{'longest step':>14}{'hit rate':>10}{'hot ones':>10}"
            f"{'requests/s':>12}{'tokens/s':>10}{'hot wait p50/max, s':>21}{'waiting':>11}"
        )
    for outcome in outcomes:
        waits = ", ".join(f"{'' if c.is_admitted else '>'}{c.wait:.2f}" for c in outcome.cold)
        hot = f"{statistics.median(outcome.hot_waits):.2f}/{max(outcome.hot_waits):.2f}"
        yield (
            f"{outcome.order:<10}{waits:>38}{outcome.num_starved(setting.max_wait):>9}"
            f"{outcome.num_steps_too_late(setting.max_wait):>12}"
            f"{1e3 * outcome.longest_step:>11.0f} ms{outcome.hit_rate(figures.num_compared):>10.2%}"
            f"{outcome.hit_rate(figures.num_compared, hot_only=True):>10.2%}"
            f"{len(outcome.hits) / outcome.seconds:>12.1f}"
            f"{outcome.num_tokens / outcome.seconds:>10.0f}{hot:>21}"
            f"{f'{outcome.min_waiting}-{outcome.max_waiting}':>11}"
        )
    yield f"the hit rate is that of the first {figures.num_compared:,} requests to end"
    for outcome in outcomes:
        during = outcome.largest_gap(in_prefill=True)
        if not math.isnan(during):
            yield (
                f"{outcome.order}: largest gap of the stream {1e3 * during:.0f} ms while "
                f"{setting.long_tokens:,} tokens are prefilled, "
                f"{1e3 * outcome.largest_gap(in_prefill=False):.0f} ms otherwise"
            )
    if figures.stalls:
        yield (
            f"\n{'a step':<21}{'largest gap without':>20}"
            f"{f'beside {setting.long_tokens:,} tokens':>24}{'their first token after':>25}"
        )
    for stall in figures.stalls:
        yield (
            f"{_told(stall.bounds):<21}{1e3 * stall.largest_gap_without:>17.0f} ms"
            f"{1e3 * stall.largest_gap_during:>21.0f} ms{stall.prefill:>23.2f} s"
        )


def verdicts(figures: Figures, setting: Setting) -> dict[str, bool]:
    """The goals, and whether they are met."""
    met: dict[str, bool] = {}
    by_name = {outcome.order: outcome for outcome in figures.outcomes if outcome.hits}
    pure = by_name.get("pure lpm")
    for name in ("program", "lpm"):
        outcome = by_name.get(name)
        if outcome is None or not outcome.cold:
            continue
        bound = setting.max_wait + outcome.longest_step
        num_starved = outcome.num_starved(setting.max_wait)
        met[f"{name}: no cold request starves: {num_starved} do"] = not num_starved
        met[
            f"{name}: no cold request waits longer than {setting.max_wait:g} s and a step "
            f"({bound:.2f} s): {outcome.longest_wait:.2f} s"
        ] = outcome.longest_wait <= bound
        if pure is not None:
            lost = pure.hit_rate(figures.num_compared) - outcome.hit_rate(figures.num_compared)
            met[
                f"{name}: the hit rate is within {100 * GOAL_POINTS:.0f} points of pure longest "
                f"prefix first: {100 * lost:.2f} points less"
            ] = lost <= GOAL_POINTS
    return met


def as_dict(figures: Figures, setting: Setting) -> dict[str, Any]:
    return {
        "setting": asdict(setting),
        "orders": [
            {
                "order": outcome.order,
                "hit_rate": outcome.hit_rate(figures.num_compared),
                "hit_rate_of_hot": outcome.hit_rate(figures.num_compared, hot_only=True),
                "num_ended": len(outcome.hits),
                "requests_per_second": len(outcome.hits) / max(outcome.seconds, 1e-9),
                "tokens_per_second": outcome.num_tokens / max(outcome.seconds, 1e-9),
                "cold": [asdict(cold) for cold in outcome.cold],
                "steps_too_late": outcome.num_steps_too_late(setting.max_wait),
                "longest_step": outcome.longest_step,
                "largest_gap_in_prefill": outcome.largest_gap(in_prefill=True),
                "largest_gap_otherwise": outcome.largest_gap(in_prefill=False),
            }
            for outcome in figures.outcomes
        ],
        "stalls": [asdict(stall) for stall in figures.stalls],
        "goals": verdicts(figures, setting),
    }


def main(argv: list[str] | None = None) -> None:
    usual = Setting()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    for name, kind, text in (
        ("seconds", float, "under each order"),
        ("max-wait", float, "the bound, in seconds"),
        ("num-hot", int, "shared prefixes"),
        ("hot-tokens", int, "in each of them"),
        ("depth", int, "hot requests under way at any time"),
        ("max-running", int, "that run of them"),
        ("pool-tokens", int, "that the cache has room for"),
        ("num-cold", int, "cold requests, the last one a long one"),
        ("long-tokens", int, "in the prompt of the long one"),
        ("seed", int, "of the prompts"),
    ):
        default = getattr(usual, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} ({default})")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)

    from palmette.runtime.config import EngineConfig
    from palmette.runtime.loading import load_model
    from palmette.runtime.loading.registry import resolve_model
    from palmette.runtime.tokenization import load_tokenizer

    fields = {name: getattr(args, name) for name in asdict(usual) if hasattr(args, name)}
    setting = Setting(**fields)
    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, args.dtype), load_tokenizer(path)

    def make(options: EngineOptions) -> Engine:
        return Engine.assemble(args.model, loaded, tokenizer, EngineConfig.of(options))

    def say(what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)

    traffic = Traffic(setting, tokenizer.vocab_size)
    figures = Figures()
    try:
        measure(make, traffic, setting, figures, say)
    except KeyboardInterrupt:
        say("interrupted: what follows is not complete")
    dtype = str(loaded.dtype).removeprefix("torch.")
    print(
        f"{setting.seconds:g} s of hot traffic: {setting.depth} under way, {setting.max_running} "
        f"running, {setting.num_hot} prefixes of {setting.hot_tokens} tokens; bound "
        f"{setting.max_wait:g} s; {dtype}, {platform.machine()}\n"
    )
    print("\n".join(lines(figures, setting)), end="\n\n")
    for goal, is_met in verdicts(figures, setting).items():
        print(f"{'met    ' if is_met else 'NOT MET'}  {goal}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(
            json.dumps(as_dict(figures, setting), indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
