"""The same ids whatever the cache holds, and whatever else the engine does at the time: a matrix.

Every prompt is continued greedily and with a seed of its own under each of 144 settings: {cold,
warm} x {1, 8, 32 sequences at a time} x {steps of 16, 64, any number of tokens} x {1, 2 threads} x
{preempted, undisturbed} x {jump-forward on, off}. The ids of one prompt and seed are to have one
hash. Where a setting's ids differ from those of the first one, both draws at the first difference
are looked at: it is a tie if what the sampler decided by, there and here, was within 1e-4 (of
logits for a greedy draw, of cumulative probability for a sampled one). Ties are listed; anything
else is an error, and the exit code is 1.

    python -m benchmarks.determinism --json determinism.json     # all of it; go on where it stopped
    python -m benchmarks.determinism --quick                     # 12 prompts, 9 settings
    python -m benchmarks.determinism --only batch-8 batch-32 preempted --logits

With `--json`, settings that the file holds already are not run again; it is for one state of the
code. With `--logits`, the logits at each position are compared as well with those of the first
setting, which is then run in any case.

"Warm" means that an earlier pass has computed every prompt, and others that share two thirds of
one, so that pages are shared in part. "Preempted" means a pool too small for what runs at a time.
One sequence alone is never preempted, since a request that does not fit is refused; so with one at
a time, each prompt has the company of a short sequence, not compared, that takes its last page.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from palmette.errors import EngineError
from palmette.protocol import Constraint, Message, Request, SamplingParams, TokenEvent
from palmette.runtime.config import CacheSection, EngineConfig, SchedulerSection
from palmette.runtime.constraints import CompiledConstraint, ConstraintCompiler
from palmette.runtime.engine import Engine, EngineTokenizer
from palmette.runtime.loading import LoadedModel, load_model
from palmette.runtime.loading.registry import resolve_model
from palmette.runtime.sampling import SampledToken, SamplingRow, uniform
from palmette.runtime.sampling.adjustments import adjusted
from palmette.runtime.sampling.distribution import weights
from palmette.runtime.testing import on_draws
from palmette.runtime.tokenization import load_tokenizer

TIE = 1e-4

# The share of the pages that as many average sequences need as could run at a time. At 0.2 a
# tenth to a third of them are preempted; the longest must fit in any case.
SMALL_POOL = 0.2


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the matrix."""

    warm: bool = False
    batch: int = 1
    chunk: int | None = None  # tokens of a step
    threads: int = 1
    preempted: bool = False
    jump_forward: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (
            "warm" if self.warm else "cold",
            f"batch-{self.batch}",
            f"chunk-{self.chunk or 'none'}",
            f"threads-{self.threads}",
            "preempted" if self.preempted else "undisturbed",
            "jump" if self.jump_forward else "no-jump",
        )

    @property
    def name(self) -> str:
        return " ".join(self.words)


REFERENCE = Setting()


def matrix() -> list[Setting]:
    """Every setting, `REFERENCE` first."""
    return [
        Setting(warm=w, batch=b, chunk=c, threads=t, preempted=p, jump_forward=j)
        for t, b, c, w, p, j in itertools.product(
            (1, 2), (1, 8, 32), (None, 64, 16), (False, True), (False, True), (False, True)
        )
    ]


def diagonal() -> list[Setting]:
    """Nine settings, `REFERENCE` first, among which any two values of any two axes meet."""
    cells: list[tuple[bool, int, int | None, int, bool, bool]] = [
        (False, 1, None, 1, False, False),
        (True, 1, 16, 2, True, True),
        (False, 32, 64, 2, False, True),
        (True, 8, 64, 1, True, False),
        (True, 8, None, 2, False, True),
        (False, 32, 16, 1, True, False),
        (True, 32, None, 1, True, True),
        (False, 8, 16, 2, False, False),
        (False, 1, 64, 2, False, True),
    ]
    return [
        Setting(warm=w, batch=b, chunk=c, threads=t, preempted=p, jump_forward=j)
        for w, b, c, t, p, j in cells
    ]


def chosen(settings: Iterable[Setting], words: Iterable[str]) -> list[Setting]:
    """Those that fit `words`: one of the words given for each axis that any was given for."""
    wanted = set(words)
    axes = [set(axis) for axis in zip(*(s.words for s in matrix()), strict=True)]
    return [
        setting
        for setting in settings
        if all(
            word in wanted or not wanted & axis
            for word, axis in zip(setting.words, axes, strict=True)
        )
    ]


# ------------------------------------------------------------------------------------- prompts

# The first is so long that attention reads it once for all that share it (`attention/sharing.py`).
OPENINGS = (
    "The keeper of the north gate writes down who comes and goes, and when. On the second day of "
    "the thaw the river stood at the third mark, two carts of slate waited on the far bank, and "
    "the ferry did not run. A woman with a lame mule asked for shelter and was given the loft "
    "above the toll house. Toward evening the wind turned, and with it came the first geese. On "
    "the third day the water fell by a hand. The carts crossed before noon, the second of them "
    "with a split wheel, and paid for four. A boy brought a letter for the keeper that was meant "
    "for the keeper of the south gate, and was sent on with bread in his pocket. On the fourth "
    "day nobody came. On the fifth came a man who sold needles, a man who bought hair, and a "
    "woman who said that she only wished to look at the river, and who looked at it until it was "
    "dark and the gate was shut. ",
    "Inventory of the mill at Orrin, taken by candlelight: forty sacks of rye, eleven of barley, "
    "one broken quern, nine cats. Anything that is not on this list belongs to the miller's "
    "sister. ",
    "Lesson four. Water expands when it freezes, which is why a full jug left out at night will "
    "crack. Salt lowers the point at which this happens. ",
    "Dear Anselm, your letter took nineteen days. ",
)
ENDINGS = (
    "In the morning",
    "Nobody had thought of the",
    "There were, all told, about",
    "What followed is easily told:",
    "When asked about it later, the children said that",
    "It was the smallest of them, a boy with one shoe and a great deal to say, who answered that",
    "The reason was simple, and the reason was",
)
ALONE = (
    "Two things float: cork, and",
    "A good knot is one that you can",
    "def area(width, height):\n    return",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: Which is heavier, a pound of feathers or a pound of lead?\nA:",
    "Die Brücke über den Fluss ist",
    "name,age,town\nIda,41,Bruck\nOtto,",
    "Roses need sun, ferns need shade, and mushrooms need",
)
ASKED = (
    "Say in one sentence why bread rises.",
    "Which month comes after the one that comes after June?",
    "Give the shop's opening hours.",
    "Describe the cat.",
)
SYSTEM = "You keep the counter of a small shop. You answer briefly, and you never guess."

CONSTRAINTS = (
    Constraint.regex(r"(on|before) 14/03/1852, (early|late)"),
    Constraint.json_schema(
        {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["n", "ok"],
            "additionalProperties": False,
        }
    ),
    Constraint.choices(["4711 jars", "4712 jars", "4711 lids"]),
    Constraint.regex(r"[A-Z]{3}-2026-[0-9]{2}-0000"),
)

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": ((40, 2.5), (101, -100.0))},
    {"temperature": 1.4, "top_p": 0.95, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.1},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and seed. Its seed is its own, and so names it in the sampler."""

    name: str
    request: Request
    compiled: CompiledConstraint | None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.request.sampling.max_tokens


def prompts(tokenizer: EngineTokenizer) -> list[list[int]]:
    """Forty of them, so ordered that the first twelve are of every kind.

    Of ten in a row four share one opening and three another, one is a turn of a conversation, two
    are alone.
    """
    found: list[list[int]] = []
    for tenth, question in enumerate(ASKED):
        opening, other = OPENINGS[tenth], OPENINGS[(tenth + 1) % len(OPENINGS)]
        texts = [opening + ending for ending in ENDINGS[:4]]
        texts += [other + ending for ending in ENDINGS[4:]]
        found += [tokenizer.encode(text) for text in texts]
        conversation: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        found.append(tokenizer.encode(tokenizer.chat_template.render(conversation)))
        found += [tokenizer.encode(text) for text in ALONE[2 * tenth : 2 * tenth + 2]]
    return found


def cases(
    tokenizer: EngineTokenizer,
    compiler: ConstraintCompiler,
    *,
    num_prompts: int = 40,
    num_new: int = 10,
    every: int = 1,
) -> list[Case]:
    """Each prompt greedily and sampled, every third one under a constraint.

    The two have different salts, so that neither finds the other's prompt in the cache. `every=n`
    takes only each n-th token of the prompts, for tokenizers that make many.
    """
    made: list[Case] = []
    for index, token_ids in enumerate(prompts(tokenizer)[:num_prompts]):
        constraint = CONSTRAINTS[index // 3 % len(CONSTRAINTS)] if index % 3 == 2 else None
        compiled = compiler.compile(constraint) if constraint is not None else None
        most = num_new if compiled is None else max(num_new, compiled.shortest_length + 4)
        for kind, options in (("greedy", {"temperature": 0.0}), ("sampled", _sampled(index))):
            seed = 1000 + len(made)
            made.append(
                Case(
                    f"{index:02} {kind}",
                    Request(
                        request_id=f"{seed}",
                        token_ids=tuple(token_ids[::every]),
                        sampling=SamplingParams(
                            **options, seed=seed, max_tokens=most, ignore_eos=constraint is None
                        ),
                        constraint=constraint,
                        salt=kind,
                    ),
                    compiled,
                )
            )
    return made


def _sampled(index: int) -> dict[str, Any]:
    return SAMPLED[index % len(SAMPLED)]


# --------------------------------------------------------------------------------------- draws


@dataclass(frozen=True, slots=True)
class Draw:
    """What was drawn, what would have been drawn next to it, and how near that was.

    `decided_by` is "logits" or "probability"; or the filter that nearly kept, or nearly left out,
    so much probability that the draw might have been another.
    """

    token_id: int
    other_id: int
    gap: float
    decided_by: str

    def as_list(self) -> list[Any]:
        """As JSON can hold it, which has no infinity."""
        gap = None if math.isinf(self.gap) else self.gap
        return [self.token_id, self.other_id, gap, self.decided_by]

    @classmethod
    def of(cls, told: list[Any]) -> Draw:
        """What `as_list` gave."""
        token_id, other_id, gap, decided_by = told
        return cls(token_id, other_id, math.inf if gap is None else gap, decided_by)


def draws_of(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    answers: Sequence[SampledToken | EngineError],
) -> list[Draw]:
    """One for each row of `logits` [R, vocab_size], as the sampler had them."""
    found: list[Draw] = []
    changed = adjusted(logits, rows)
    for row, values, answer in zip(rows, changed, answers, strict=True):
        if isinstance(answer, EngineError):
            raise answer
        decide = _greedy if row.is_greedy else _drawn
        found.append(decide(row, values, answer.token_id))
    return found


def _greedy(row: SamplingRow, values: torch.Tensor, token_id: int) -> Draw:
    best, ids = values.topk(2)
    other = int(ids[1]) if int(ids[0]) == token_id else int(ids[0])
    return Draw(token_id, other, _apart(float(best[0]), float(best[1])), "logits")


def _drawn(row: SamplingRow, values: torch.Tensor, token_id: int) -> Draw:
    kept = weights(values[None], [row.params])[0]
    cumulative = kept.cumsum(0)
    total = int(cumulative[-1])
    point = uniform(row.seed, row.path, row.position) * total
    high = int(cumulative[token_id])
    low = high - int(kept[token_id])
    below, above = (point - low) / total, (high - point) / total
    sides = [(math.inf, token_id)]
    if low > 0:
        sides.append((below, int(torch.searchsorted(cumulative, low))))
    if high < total:
        sides.append((above, int(torch.searchsorted(cumulative, high, right=True))))
    gap, other = min(sides)
    if gap >= TIE:
        kept_share = total / int(weights(values[None], [_unfiltered(row.params)])[0].sum())
        for cut, mass, name in _cuts(row.params, values):
            if cut < TIE and min(below, above) < mass / kept_share + TIE:
                return Draw(token_id, other, cut, name)
    # The draw rounds down to whole numbers, so the point may lie just outside.
    return Draw(token_id, other, abs(gap), "probability")


def _unfiltered(params: SamplingParams) -> SamplingParams:
    return replace(params, top_p=1.0, top_k=-1, min_p=0.0)


def _cuts(params: SamplingParams, values: torch.Tensor) -> list[tuple[float, float, str]]:
    """For each filter how near a token was to being kept, or left out; the probability of all
    tokens for which that is within `TIE`, and so by how much they can move a draw; its name.
    """
    if params.top_p == 1 and params.min_p == 0 and not 0 < params.top_k < len(values):
        return []
    masses = weights(values[None], [_unfiltered(params)])[0].double()
    masses, order = (masses / masses.sum()).sort(descending=True, stable=True)
    distances: list[tuple[torch.Tensor, str]] = []
    if params.top_p < 1:
        distances.append((masses.cumsum(0) - masses - params.top_p, "top_p"))
    if params.min_p > 0:
        distances.append((masses / masses[0] - params.min_p, "min_p"))
    if 0 < params.top_k < len(values):
        ranked = values[order]
        last = ranked[params.top_k - 1]
        # The last one kept is as near to its fall as the next one is to its rise.
        apart = last - ranked
        apart[params.top_k - 1] = apart[params.top_k]
        apart[: params.top_k - 1] = torch.inf
        distances.append((apart, "top_k"))
    return [
        (float(away.abs().min()), float(masses[away.abs() < TIE].sum()), name)
        for away, name in distances
    ]


def _apart(high: float, low: float) -> float:
    return math.inf if low == -math.inf else high - low


class Recorder:
    """Hears every draw of the cases; compares logits with those it was given, if any.

    `logits` maps (seed, position) to the model's logits [vocab_rows] of an earlier run. With
    `keeps_logits` this run's are kept there.
    """

    def __init__(
        self,
        seeds: Iterable[int],
        logits: dict[tuple[int, int], torch.Tensor] | None = None,
        *,
        keeps_logits: bool = False,
    ) -> None:
        self.draws: dict[int, dict[int, Draw]] = {seed: {} for seed in seeds}
        self.differences: dict[int, dict[int, float]] = {seed: {} for seed in self.draws}
        self.logits = {} if logits is None else logits
        self._keeps_logits = keeps_logits

    def hear(
        self,
        vocab_size: int,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        answers: Sequence[SampledToken | EngineError],
    ) -> None:
        mine = [index for index, row in enumerate(rows) if row.seed in self.draws]
        if not mine:
            return
        logits = logits[mine]
        rows = [rows[index] for index in mine]
        answers = [answers[index] for index in mine]
        for row, draw in zip(rows, draws_of(logits[:, :vocab_size], rows, answers), strict=True):
            self.draws[row.seed][row.position] = draw
        for row, values in zip(rows, logits, strict=True):
            key = row.seed, row.position
            if self._keeps_logits:
                self.logits[key] = values.clone()
            elif key in self.logits:
                difference = float((values - self.logits[key]).abs().max())
                self.differences[row.seed][row.position] = difference


# ---------------------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a case's ids first differ from the reference's, and the draws of both there."""

    case: str
    position: int  # from the first new token
    reference: Draw | None
    here: Draw | None

    @property
    def gap(self) -> float:
        """The larger of the two; without a draw, as after forced tokens, there is no tie."""
        draws = (self.reference, self.here)
        return max(math.inf if draw is None else draw.gap for draw in draws)

    @property
    def is_tie(self) -> bool:
        """The two were near each other in both runs, or near to being cut off by a filter."""
        there, here = self.reference, self.here
        if there is None or here is None or self.gap >= TIE:
            return False
        same = {there.token_id, there.other_id} == {here.token_id, here.other_id}
        return same or {there.decided_by, here.decided_by} <= {"top_k", "top_p", "min_p"}

    def as_dict(self) -> dict[str, Any]:
        draws = {"reference": self.reference, "here": self.here}
        told = {name: draw and draw.as_list() for name, draw in draws.items()}
        return {"case": self.case, "position": self.position, **told}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Difference:
        """What `as_dict` gave."""
        draws = {name: told[name] and Draw.of(told[name]) for name in ("reference", "here")}
        return cls(case=told["case"], position=told["position"], **draws)


@dataclass(slots=True, kw_only=True)
class Run:
    """What one setting gave."""

    setting: Setting
    hashes: dict[str, str]
    seconds: float
    num_preempted: int  # cases that were, at least once
    cached_tokens: int
    forced_tokens: int
    differences: list[Difference] = field(default_factory=list)
    greatest_logit_difference: float | None = None  # from the reference's
    num_positions: int = 0  # whose logits were compared
    num_equal: int = 0  # and were the same to the bit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "differences": [each.as_dict() for each in self.differences]}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Run:
        """What `as_dict` gave."""
        differences = [Difference.of(each) for each in told["differences"]]
        setting = Setting(**told["setting"])
        return cls(**{**told, "setting": setting, "differences": differences})


@dataclass(slots=True, kw_only=True)
class Reference:
    """The ids that all others should give, and how each came about."""

    ids: dict[str, list[int]]
    draws: dict[str, dict[int, Draw]]  # by position in the sequence


class Matrix:
    """Runs cases under settings, each on fresh engines over one load of the weights."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: EngineTokenizer,
        cases: Sequence[Case],
        *,
        page_size: int = 16,
        compares_logits: bool = False,
    ) -> None:
        self.loaded = loaded
        self.tokenizer = tokenizer
        self.cases = list(cases)
        self.reference: Reference | None = None
        self._page_size = page_size
        self._compares_logits = compares_logits
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        if len({case.request.sampling.seed for case in cases}) < len(self.cases):
            raise ValueError("two cases have the same seed")

    def run(self, setting: Setting, finished: Callable[[int], None] = lambda count: None) -> Run:
        """The first run is the reference of others.

        `finished` is told how many cases have ended.
        """
        is_reference = self.reference is None or setting == REFERENCE
        seeds = [_seed(case) for case in self.cases]
        keeps = is_reference and self._compares_logits
        recorder = Recorder(seeds, self._logits, keeps_logits=keeps)
        threads = torch.get_num_threads()
        torch.set_num_threads(setting.threads)
        start = time.perf_counter()
        try:
            ended = self._carry_out(setting, recorder, finished)
        finally:
            torch.set_num_threads(threads)
        seconds = time.perf_counter() - start
        ids = {case.name: ended[case.name].ids for case in self.cases}
        usages = [e.last.usage for e in ended.values() if e.last is not None]
        run = Run(
            setting=setting,
            hashes={name: hash_of(found) for name, found in ids.items()},
            seconds=seconds,
            num_preempted=_num_preempted(ended),
            cached_tokens=sum(usage.cached_tokens for usage in usages if usage),
            forced_tokens=sum(usage.forced_tokens for usage in usages if usage),
        )
        draws = {case.name: recorder.draws[_seed(case)] for case in self.cases}
        if is_reference and self.reference is None:
            self.reference = Reference(ids=ids, draws=draws)
        assert self.reference is not None
        run.differences = [
            found
            for case in self.cases
            if (found := _difference(case, self.reference, ids[case.name], draws[case.name]))
        ]
        if self._compares_logits and not is_reference:
            self._compare_logits(run, recorder)
        return run

    def _compare_logits(self, run: Run, recorder: Recorder) -> None:
        """Up to the first difference of ids, since what follows one continues another text."""
        ends = {e.case: e.position for e in run.differences}
        found: list[float] = []
        for case in self.cases:
            most = case.num_prompt_tokens + ends.get(case.name, case.num_tokens)
            differences = recorder.differences[_seed(case)]
            found += [value for position, value in differences.items() if position <= most]
        run.greatest_logit_difference = max(found, default=0.0)
        run.num_positions, run.num_equal = len(found), found.count(0.0)

    def _carry_out(
        self, setting: Setting, recorder: Recorder, finished: Callable[[int], None]
    ) -> dict[str, _Ended]:
        if setting.preempted and setting.batch == 1:
            return self._each_in_company(setting, recorder, finished)
        sizes = [self._num_pages(case.num_tokens) for case in self.cases]
        if not setting.preempted:
            # For all, for the earlier pass too, and nothing is evicted.
            return self._all_at_once(setting, 3 * sum(sizes), recorder, finished)
        # With few tokens in a step, most of them prefill, and no more than these run at a time.
        most = min(setting.batch, len(sizes), (setting.chunk or 1 << 20) // 4)
        num_pages = max(*sizes, math.ceil(SMALL_POOL * most * sum(sizes) / len(sizes)))
        ended = self._all_at_once(setting, num_pages, recorder, finished)
        # It is the prompts' lengths that decide whether any is; a run without is none of this kind.
        while not _num_preempted(ended) and num_pages > max(sizes):
            num_pages = max(*sizes, num_pages * 3 // 4)
            ended = self._all_at_once(setting, num_pages, recorder, finished)
        return ended

    def _all_at_once(
        self,
        setting: Setting,
        num_pages: int,
        recorder: Recorder,
        finished: Callable[[int], None],
    ) -> dict[str, _Ended]:
        engine = self._engine(setting, num_pages, setting.batch, recorder)
        if setting.warm:
            _warm_up(engine, self.cases)
        return _serve(engine, self.cases, finished)

    def _each_in_company(
        self, setting: Setting, recorder: Recorder, finished: Callable[[int], None]
    ) -> dict[str, _Ended]:
        """Each case runs beside a sequence that was there first and soon needs another page, when
        none is left; so the case is preempted, and starts over once that sequence has ended.
        """
        ended: dict[str, _Ended] = {}
        for case in self.cases:
            # The company's last page is full three steps after the case's prompt is computed.
            num_steps = 0
            if setting.chunk is not None and not setting.warm:
                num_steps = case.num_prompt_tokens // (setting.chunk - 1)
            num_first = self._num_pages(case.num_prompt_tokens)
            num_more = self._num_pages(case.num_tokens) - num_first
            num_others = max(num_more, self._num_pages(3 + num_steps))
            company = tuple(range(33, 33 + num_others * self._page_size - 2 - num_steps))
            engine = self._engine(setting, num_first + num_others, 2, recorder)
            if setting.warm:
                _warm_up(engine, [case])
            sampling = SamplingParams(temperature=0.0, max_tokens=4 + num_steps, ignore_eos=True)
            engine.submit(Request(request_id="company", token_ids=company, sampling=sampling))
            while engine.stats().decoded_tokens == 0:
                engine.step()
            ended |= _serve(engine, [case])
            finished(len(ended))
        return ended

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _engine(
        self, setting: Setting, num_pages: int, max_running: int, recorder: Recorder
    ) -> Engine:
        config = EngineConfig(
            cache=CacheSection(page_size=self._page_size, num_pages=num_pages),
            scheduler=SchedulerSection(
                max_batch_tokens=setting.chunk or 1 << 20,
                max_step_seconds=None,  # the chunks are the setting's
                max_running=max_running,
                jump_forward=setting.jump_forward,
            ),
        )
        engine = Engine.assemble("determinism", self.loaded, self.tokenizer, config)
        vocab_size = min(self.tokenizer.vocab_size, self.loaded.config.vocab_rows)
        on_draws(engine, lambda *heard: recorder.hear(vocab_size, *heard))
        return engine


@dataclass(slots=True)
class _Ended:
    ids: list[int] = field(default_factory=list)
    last: TokenEvent | None = None


def _num_preempted(ended: dict[str, _Ended]) -> int:
    usages = [each.last.usage for each in ended.values() if each.last is not None]
    return sum(usage.num_preemptions > 0 for usage in usages if usage is not None)


def _serve(
    engine: Engine, cases: Sequence[Case], finished: Callable[[int], None] = lambda count: None
) -> dict[str, _Ended]:
    """Everything the cases give, all of them submitted at once."""
    by_id = {case.request.request_id: case for case in cases}
    found = {case.name: _Ended() for case in cases}
    num_ended = 0
    for case in cases:
        engine.submit(case.request, compiled=case.compiled)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.request_id not in by_id or not isinstance(event, TokenEvent):
                continue
            ended = found[by_id[event.request_id].name]
            ended.ids += event.token_ids
            if event.finish_reason is not None:
                ended.last = event
                num_ended += 1
        finished(num_ended)
    return found


def _warm_up(engine: Engine, cases: Sequence[Case]) -> None:
    """An earlier pass over every prompt and, before, others that leave them inside a page."""
    nothing = SamplingParams(max_tokens=0)
    for index, case in enumerate(cases):
        prompt, salt = case.request.token_ids, case.request.salt
        other = (*prompt[: 2 * len(prompt) // 3], *prompt[: 1 + index % 5])
        for name, token_ids in (("other", other), ("same", prompt)):
            engine.submit(
                Request(
                    request_id=f"{name} {index}", token_ids=token_ids, sampling=nothing, salt=salt
                )
            )
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise event.error


def _difference(
    case: Case, reference: Reference, ids: list[int], draws: dict[int, Draw]
) -> Difference | None:
    expected = reference.ids[case.name]
    if ids == expected:
        return None
    pairs = itertools.zip_longest(expected, ids)  # one of them may have ended
    position = next(i for i, (a, b) in enumerate(pairs) if a != b)
    place = case.num_prompt_tokens + position
    return Difference(
        case=case.name,
        position=position,
        reference=reference.draws[case.name].get(place),
        here=draws.get(place),
    )


def hash_of(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def _seed(case: Case) -> int:
    seed = case.request.sampling.seed
    assert seed is not None
    return seed


# ------------------------------------------------------------------------- results and their file


class Results:
    """The runs so far, kept in a file if there is one."""

    def __init__(self, about: dict[str, Any], path: Path | None = None) -> None:
        """Reads the file if it is there. Raises ValueError if it is about something else."""
        self.about = about
        self.runs: dict[str, Run] = {}
        self.reference: Reference | None = None
        self._path = path
        if path is not None and path.exists():
            self._read(json.loads(path.read_text()))

    def add(self, run: Run, reference: Reference | None) -> None:
        self.runs[run.setting.name] = run
        self.reference = reference
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_name(self._path.name + ".partial")
            partial.write_text(json.dumps(self._as_dict(), indent=1) + "\n")
            os.replace(partial, self._path)

    def _as_dict(self) -> dict[str, Any]:
        reference = self.reference
        draws = {} if reference is None else reference.draws
        return {
            "about": self.about,
            "ids": {} if reference is None else reference.ids,
            "draws": {
                name: {place: draw.as_list() for place, draw in places.items()}
                for name, places in draws.items()
            },
            "runs": [run.as_dict() for run in self.runs.values()],
        }

    def _read(self, held: dict[str, Any]) -> None:
        for key in sorted({*self.about, *held["about"]}):
            there, here = held["about"].get(key), self.about.get(key)
            if there != here:
                raise ValueError(f"{self._path} has {key} {there!r}, this run {here!r}")
        if held["ids"]:
            draws = {
                name: {int(place): Draw.of(told) for place, told in places.items()}
                for name, places in held["draws"].items()
            }
            self.reference = Reference(ids=held["ids"], draws=draws)
        for told in held["runs"]:
            run = Run.of(told)
            self.runs[run.setting.name] = run


def about(model: str, matrix: Matrix) -> dict[str, Any]:
    """What the figures depend on, but for the code."""
    told = [(case.name, case.request) for case in matrix.cases]
    return {
        "model": model,
        "dtype": str(matrix.loaded.dtype).removeprefix("torch."),
        "is_batch_invariant": matrix.loaded.model.is_batch_invariant,
        "torch": torch.__version__,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cases": len(told),
        "digest": hashlib.sha256(repr(told).encode()).hexdigest()[:16],
    }


def faults(runs: Iterable[Run], *, is_batch_invariant: bool) -> list[str]:
    """What breaks the promise, in words. A model that promises the same bits may have no ties."""
    found: list[str] = []
    for run in runs:
        found += [
            f"{run.setting.name}: {difference.case}, token {difference.position}: "
            f"{difference.reference} there, {difference.here} here"
            for difference in run.differences
            if is_batch_invariant or not difference.is_tie
        ]
        if run.setting.preempted and not run.num_preempted:
            found.append(f"{run.setting.name}: nothing was preempted")
        if is_batch_invariant and run.greatest_logit_difference:
            found.append(
                f"{run.setting.name}: logits differ by {run.greatest_logit_difference:.2g}, "
                "although the model promises the same bits"
            )
    return found


def report(console: Console, results: Results, num_settings: int) -> None:
    """Tables of what is there."""
    runs = list(results.runs.values())
    if not runs:
        console.print("Nothing has been run.")
        return
    differences = [(run, difference) for run in runs for difference in run.differences]
    by_case: dict[str, set[str]] = {}
    for run in runs:
        for name, digest in run.hashes.items():
            by_case.setdefault(name, set()).add(digest)
    told = results.about
    summary = Table(
        title=f"{told['model']}, {told['dtype']}, {told['processor']}, torch {told['torch']}",
        title_justify="left",
        show_header=False,
    )
    num_greedy = sum(name.endswith("greedy") for name in by_case)
    preempted = [run for run in runs if run.setting.preempted]
    for name, value in (
        ("settings", f"{len(runs)} of {num_settings}"),
        ("prompts x {greedy, sampled}", f"{num_greedy} + {len(by_case) - num_greedy}"),
        ("with one hash in all settings", f"{sum(len(h) == 1 for h in by_case.values())}"),
        ("hashes in all", f"{sum(len(run.hashes) for run in runs):,}"),
        ("hashes that differ", f"{len(differences)}"),
        (f"of them ties under {TIE:g}", f"{sum(d.is_tie for _, d in differences)}"),
        ("nearest decisions of the first setting", _nearest(results.reference)),
        ("preempted, by setting", _span([run.num_preempted for run in preempted])),
        (
            "forced tokens, by setting with jump",
            _span([run.forced_tokens for run in runs if run.setting.jump_forward]),
        ),
        ("seconds in all", f"{sum(run.seconds for run in runs):,.0f}"),
        ("promises the same bits", "yes" if told["is_batch_invariant"] else "no"),
    ):
        summary.add_row(name, value)
    console.print(summary)
    if differences:
        table = Table(title="Where ids first differ", title_justify="left")
        for heading in ("setting", "prompt", "token", "there", "here", "decided by", "gap", "tie"):
            table.add_column(heading)
        for run, difference in differences:
            draws = (difference.reference, difference.here)
            table.add_row(
                run.setting.name,
                difference.case,
                str(difference.position),
                *("-" if draw is None else f"{draw.token_id} or {draw.other_id}" for draw in draws),
                ", ".join(sorted({draw.decided_by for draw in draws if draw is not None})),
                f"{difference.gap:.1e}",
                "yes" if difference.is_tie else "NO",
            )
        console.print(table)
    compared = [run for run in runs if run.greatest_logit_difference is not None]
    if compared:
        console.print(_logits_table(compared))


def _logits_table(runs: Sequence[Run]) -> Table:
    table = Table(
        title="Logits at the same position, against the first setting", title_justify="left"
    )
    table.add_column("settings with")
    for heading in ("settings", "greatest difference", "positions", "the same bits"):
        table.add_column(heading, justify="right")
    words = dict.fromkeys(
        word for axis in zip(*(r.setting.words for r in runs), strict=True) for word in axis
    )
    for word in ("", *sorted(words)):
        mine = [run for run in runs if not word or word in run.setting.words]
        num_positions = sum(run.num_positions for run in mine)
        table.add_row(
            word or "all",
            str(len(mine)),
            f"{max(run.greatest_logit_difference or 0.0 for run in mine):.2g}",
            f"{num_positions:,}",
            f"{sum(run.num_equal for run in mine) / max(1, num_positions):.2%}",
        )
    return table


def _nearest(reference: Reference | None) -> str:
    draws = [] if reference is None else [d for c in reference.draws.values() for d in c.values()]
    found = []
    for name in ("logits", "probability"):
        gaps = [draw.gap for draw in draws if draw.decided_by == name]
        if gaps:
            found.append(f"{min(gaps):.1e} of {name}")
    return ", ".join(found) or "-"


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if counts else "-"


# --------------------------------------------------------------------------------- command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = sorted({word for setting in matrix() for word in setting.words})
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"Words for --only: {', '.join(words)}.",
    )
    parser.add_argument("--model", default="smollm2-135m", help="a known name, or a path")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, help="how many of the 40")
    parser.add_argument("--quick", action="store_true", help="12 prompts, 9 settings: a minute")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=words,
        metavar="WORD",
        help="settings that have these; several words of one axis are alternatives",
    )
    parser.add_argument("--logits", action="store_true", help="compare the logits as well")
    parser.add_argument("--json", type=Path, help="keep results in this file, and go on from it")
    args = parser.parse_args(argv)
    args.prompts = args.prompts or (12 if args.quick else 40)
    if not 1 <= args.prompts <= 40:
        parser.error(f"--prompts must be 1 to 40, got {args.prompts}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    path = resolve_model(args.model)
    loaded, tokenizer = load_model(path, args.dtype), load_tokenizer(path)
    engine = Engine.assemble(
        args.model, loaded, tokenizer, EngineConfig(cache=CacheSection(num_pages=4))
    )
    found = cases(tokenizer, engine.constraints, num_prompts=args.prompts)
    bench = Matrix(loaded, tokenizer, found, compares_logits=args.logits)
    try:
        results = Results(about(args.model, bench), args.json)
    except ValueError as error:
        sys.exit(f"{error}: give another file to --json")
    bench.reference = results.reference
    settings = chosen(diagonal() if args.quick else matrix(), args.only)
    wanted = [s for s in settings if _is_missing(results.runs.get(s.name), args.logits)]
    if wanted and (args.logits or bench.reference is None):
        wanted = [REFERENCE, *(s for s in wanted if s != REFERENCE)]
    interrupted = False
    try:
        _run_all(bench, wanted, results, console)
    except KeyboardInterrupt:
        interrupted = True
    report(console, results, len({s.name for s in settings} | set(results.runs)))
    broken = faults(results.runs.values(), is_batch_invariant=results.about["is_batch_invariant"])
    for fault in broken:
        console.print(fault, markup=False)
    if interrupted:
        console.print("Interrupted; with --json the same command goes on from here.")
        return 130
    return 1 if broken else 0


def _is_missing(run: Run | None, with_logits: bool) -> bool:
    if run is None:
        return True
    lacks_logits = run.greatest_logit_difference is None and run.setting != REFERENCE
    return with_logits and lacks_logits


def _run_all(
    bench: Matrix, settings: Sequence[Setting], results: Results, console: Console
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        every = progress.add_task("settings", total=len(settings))
        one = progress.add_task("", total=len(bench.cases))
        for setting in settings:
            progress.update(one, description=setting.name, completed=0)
            run = bench.run(setting, lambda count: progress.update(one, completed=count))
            results.add(run, bench.reference)
            progress.advance(every)
            if not console.is_terminal:
                console.print(f"  {setting.name}: {run.seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
