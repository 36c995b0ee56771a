"""Guessed tokens: fewer forward passes, and the same ids, counts and pages."""

from __future__ import annotations

import math
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import Unpack

from palmette.errors import InvalidRequest
from palmette.grammar.guesses import Guess
from palmette.protocol import Constraint, Outlook, Request, SamplingParams, ScoreRequest
from palmette.radix_cache import Namespace
from palmette.runtime import following
from palmette.runtime.config import EngineOptions
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.following import Found
from palmette.runtime.scheduler.scheduler import num_worth_computing
from palmette.runtime.scheduler.step_time import StepLoad
from palmette.runtime.sequence import GenerationSequence, Sequence
from palmette.runtime.testing import history_engine
from tests.runtime.engine.test_engine import Outcome, check_ledger, run
from tests.runtime.engine.test_jump_forward import (
    CONSTRAINTS,
    KINDS,
    all_requests,
    engine_of,
    request,
    tokenizer,
)
from tests.runtime.scheduler.test_scheduler import World

MODES = ("token", "canonical")


def again(requests: list[Request]) -> list[Request]:
    return [replace(each, request_id=f"{each.request_id} again") for each in requests]


def told(outcomes: list[Outcome]) -> list[tuple[object, ...]]:
    return [(o.token_ids, o.text, o.end.finish_reason, o.end.stop_reason) for o in outcomes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_do_not_depend_on_guesses(kind: str, mode: str) -> None:
    requests = list(all_requests(jump_forward=mode))
    wanted = told([run(engine_of(kind, max_guesses=0), each)[0] for each in requests])
    for options in (
        {},
        {"num_pages": 40, "max_batch_tokens": 16},
        {"jump_forward": False},
    ):
        engine = engine_of(kind, **options)
        plain = engine_of(kind, **{**options, "max_guesses": 0})
        for _ in range(2):
            outcomes = told(run(engine, *requests))
            if options.get("jump_forward", True):
                assert outcomes == wanted
            assert outcomes == told(run(plain, *requests))
        stats, unguessed = engine.stats(), plain.stats()
        assert unguessed.guessed_tokens == unguessed.accepted_tokens == 0
        # Drawn letters that become other tokens teach nothing.
        if mode == "token" or options.get("jump_forward", True):
            assert 0 < stats.accepted_tokens < stats.guessed_tokens
            assert stats.saved_passes > unguessed.saved_passes
        assert stats.forced_tokens == unguessed.forced_tokens
        if not stats.preemptions and not unguessed.preemptions:
            # Wrong guesses are counted nowhere, and right ones are computed once.
            assert stats.computed_tokens == unguessed.computed_tokens


def test_what_was_said_before_takes_few_steps() -> None:
    colours = {"enum": ["red", "redder", "blue"]}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(("name", "age", "is", "ok", "na", "me"), colours),
        "required": ["name", "age", "is", "ok", "na", "me"],
    }
    first = request("object", Constraint.json_schema(schema), 1, jump_forward="token")
    engine, plain = engine_of(KINDS[0]), engine_of(KINDS[0], max_guesses=0)
    steps = {}
    for name, each in (("guessing", engine), ("not", plain)):
        (outcome,) = run(each, first)
        before = each.stats()
        (second,) = run(each, *again([first]))
        assert told([outcome]) == told([second])
        steps[name] = each.stats().steps - before.steps
        usage = second.end.usage
        assert usage is not None
        # The first pass and one for what was not saved; the end is drawn, or is where nothing is.
        assert usage.saved_passes == usage.completion_tokens - steps[name]
    assert steps["guessing"] <= 1 + steps["not"] // 3


def test_tokens_that_are_held_back_are_guessed_at_the_first_time() -> None:
    constraint = Constraint.regex('(a|b)":"?1')
    one = request("one", constraint, 1, jump_forward="canonical")
    engine = engine_of(KINDS[0])
    (outcome,) = run(engine, one)
    usage = outcome.end.usage
    assert usage is not None
    assert engine.stats().guessed_tokens > 0


def test_guesses_know_no_texts_with_another_salt() -> None:
    (one, *_) = all_requests(jump_forward="token")
    engine = engine_of(KINDS[0])
    run(engine, replace(one, salt="a"))
    learned = engine.stats().guessed_tokens
    run(engine, replace(one, request_id="b", salt="b"))
    assert engine.stats().guessed_tokens == 2 * learned
    run(engine, replace(one, request_id="c", salt="a"))
    assert engine.stats().guessed_tokens > 3 * learned


def test_logprobs_are_those_without_guesses() -> None:
    requests = list(all_requests(logprobs=2))
    engine, plain = engine_of(KINDS[0]), engine_of(KINDS[0], max_guesses=0)
    run(engine, *again(list(all_requests())))
    assert engine.stats().guessed_tokens > 0
    for one, other in zip(run(engine, *requests), run(plain, *requests), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


class Guesser(Sequence):
    """A sequence that may have guesses."""

    @property
    def is_guessed(self) -> bool:
        return True


def guesser(world: World, name: str, token_ids: list[int], num_outputs: int = 9) -> Guesser:
    one = Guesser(
        request_id=name,
        namespace=Namespace(),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        submitted_at=0.0,
        max_length=32,
    )
    world.num_left[name] = num_outputs
    world.scheduler.add(one)
    return one


@pytest.mark.parametrize(
    ("num_pages", "max_batch_tokens", "num_guesses"),
    [(9, 64, 8), (8, 64, 0), (7, 64, 0), (9, 18, 4), (9, 14, 0), (9, 10, 0)],
)
def test_guesses_take_only_the_room_that_others_leave(
    num_pages: int, max_batch_tokens: int, num_guesses: int
) -> None:
    world = World(
        num_pages=num_pages, max_batch_tokens=max_batch_tokens, page_size=4, prefix_cache=False
    )
    other = world.submit("other", [1, 2, 3, 4], 9)
    one = guesser(world, "one", [5, 6, 7, 8])
    world.step()
    other.token_ids += range(20, 32)  # forced: 13 tokens to compute, in 5 pages with the others
    one.guesses = (Guess(9, True),) * 8  # behind 5 tokens in 2 pages
    plan = world.scheduler.next_plan()
    assert not plan.preempted
    planned = {item.sequence: item.num_tokens for item in plan.work}
    assert planned == {one: 1 + num_guesses, other: min(13, max_batch_tokens - 1)}
    assert one.num_guesses == num_guesses


def seconds_of(load: StepLoad) -> float:
    """What steps of a small model take on two cores."""
    return 2e-3 + 0.24e-3 * load.num_tokens + 0.24e-3 * load.num_logits


def guesses_made(num_sequences: int, probability: float, *, is_learned: bool = True) -> list[int]:
    """Of eight that each sequence has, so many are planned."""
    world = World(num_pages=256, max_batch_tokens=512)
    guessers = [
        guesser(world, str(i), [100 * i + n for n in range(4)]) for i in range(num_sequences)
    ]
    world.step()
    if is_learned:
        for count in range(1, 40):
            load = StepLoad(1 + 7 * count % 30, 100 * count, 1 + count % 16)
            world.scheduler.step_time.note(load, seconds_of(load))
    for one in guessers:
        one.guesses = (Guess(9, True, probability),) * 8
    plan = world.scheduler.next_plan()
    assert [item.num_tokens for item in plan.work] == [1 + one.num_guesses for one in guessers]
    return [one.num_guesses for one in guessers]


def test_guesses_are_made_where_they_save_more_than_they_cost() -> None:
    assert guesses_made(1, 0.95) == [8]
    assert guesses_made(1, 0.1) == [0]
    assert guesses_made(16, 0.5) == [0] * 16
    alone, together = guesses_made(1, 0.8)[0], guesses_made(8, 0.8)[0]
    assert alone > together


def test_before_anything_is_learned_all_guesses_are_made() -> None:
    assert guesses_made(8, 0.1, is_learned=False) == [8] * 8


@given(
    guesses=st.lists(
        st.builds(Guess, st.just(9), st.booleans(), st.sampled_from([0.1, 0.5, 0.9, 1.0])),
        max_size=8,
    ),
    limit=st.integers(0, 8),
    seconds_each=st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(deadline=None)
def test_as_many_are_computed_as_save_most_on_average(
    guesses: list[Guess], limit: int, seconds_each: float
) -> None:
    def saved(num_guesses: int) -> float:
        """By what may come: the first ones are right, and then one is not."""
        total = -num_guesses * seconds_each
        for num_right in range(1, num_guesses + 1):
            probability = math.prod(guess.probability for guess in guesses[:num_right])
            if num_right < num_guesses:
                probability *= 1 - guesses[num_right].probability
            behind = [guess.is_drawn for guess in [*guesses, Guess(9, True)][1 : num_right + 1]]
            total += probability * sum(1.0 if is_drawn else seconds_each for is_drawn in behind)
        return total

    num_worth = num_worth_computing(guesses, limit, 1.0, seconds_each)
    assert 0 <= num_worth <= min(limit, len(guesses))
    most = max(saved(count) for count in range(min(limit, len(guesses)) + 1))
    assert saved(num_worth) == pytest.approx(most, abs=1e-9)


def test_nothing_is_planned_for_guesses_where_no_text_is_guessed() -> None:
    engine = engine_of(KINDS[0])
    plan_guesses = engine._scheduler._plan_guesses
    planned = []
    engine._scheduler._plan_guesses = lambda plan: planned.append(plan)  # type: ignore[method-assign]
    (constrained, *_) = all_requests()
    free = replace(constrained, request_id="free", constraint=None)
    run(engine, free)
    assert not planned
    engine._scheduler._plan_guesses = plan_guesses  # type: ignore[method-assign]
    run(engine, constrained)
    assert engine.stats().guessed_tokens > 0
    engine._scheduler._plan_guesses = lambda plan: planned.append(plan)  # type: ignore[method-assign]
    run(engine, free)
    assert not planned


class ReadingModel:
    """Logits that are a function of the last `depth` tokens read back, of all with None; fewer
    make texts that repeat themselves. Fails where what is read begins with no known prompt.
    """

    def __init__(self, depth: int | None, num_tokens: int) -> None:
        self.prompts: set[tuple[int, ...]] = set()
        self._depth = depth
        self._num_tokens = num_tokens

    def __call__(self, history: tuple[int, ...]) -> dict[int, float]:
        assert any(history[: len(prompt)] == prompt for prompt in self.prompts)
        seen = history if self._depth is None else history[-self._depth :]
        rng = random.Random(zlib.crc32(repr(seen).encode()))
        return {rng.randrange(self._num_tokens): rng.uniform(0, 6) for _ in range(60)}


Asked = Request | ScoreRequest

MORE_CONSTRAINTS = {
    **CONSTRAINTS,
    "enums": Constraint.json_schema(
        {
            "type": "object",
            "properties": {key: {"enum": ["red", "redder"]} for key in ("name", "age", "ok")},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    ),
    "held back": Constraint.regex('(a|b)":"?1{1,3}'),
    "loop": Constraint.regex('([{"name":}]|red|é)*'),
}


class Workload:
    """Requests, most of them several times, and when each is made or aborted, all at random."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.kind = rng.choice(KINDS)
        self.depth = rng.choice([1, 1, 2, None])
        self.is_late = rng.random() < 0.5
        self.options = self._options()
        self.asked: dict[str, Asked] = {}
        self.at: defaultdict[int, list[Asked | str]] = defaultdict(list)  # a string is an abort
        known = [self._request() for _ in range(rng.randrange(3, 9))]
        for index in range(rng.randrange(6, 24)):
            self._add(str(index), rng.choice(known), rng.choice([0, rng.randrange(60)]))

    @property
    def aborted(self) -> set[str]:
        return {each for together in self.at.values() for each in together if isinstance(each, str)}

    def _maybe(self, probability: float, **options: object) -> dict[str, object]:
        return options if self._rng.random() < probability else {}

    def _options(self) -> EngineOptions:
        rng = self._rng
        page_size = rng.choice([1, 3, 4, 16])
        options: EngineOptions = {
            "page_size": page_size,
            "num_pages": rng.choice([64, 80, 100, 130, 600]) // page_size + 2,
            "max_batch_tokens": rng.choice([1, 3, 7, 16, 64, 512]),
            "max_running": rng.choice([1, 3, 6, 64]),
            "max_guesses": rng.choice([1, 3, 8, 64]),
            "max_step_seconds": rng.choice([None, 0.0, 0.01, 0.1]),
            "prefix_cache": rng.random() < 0.85,
            "jump_forward": rng.random() < 0.8,
            "jump_mode": rng.choice(["token", "canonical"]),
            "policy": rng.choice(["program", "lpm", "fcfs"]),
            "max_context": rng.choice([40, 60, 4096]),
        }
        if options["prefix_cache"] and rng.random() < 0.3:
            options["host_memory"] = 1 << 16
        return options

    def _request(self) -> Request:
        rng = self._rng
        vocab_size = tokenizer(self.kind).vocab_size
        length, shared = rng.randrange(1, 20), rng.choice([0, 12])
        prompt = [*range(40, 40 + shared), *(rng.randrange(32, 120) for _ in range(20))][:length]
        max_tokens = rng.choice([0, 30, 40, 60])
        bias = tuple((rng.randrange(vocab_size), rng.uniform(-5, 5)) for _ in range(10))
        sampling = {
            "seed": rng.randrange(4),
            "max_tokens": max_tokens,
            "temperature": rng.choice([0.0, 0.3, 1.0, 1.5]),
            "jump_forward": rng.choice([None, "token", "canonical"]),
            **self._maybe(0.2, min_tokens=rng.randrange(max_tokens + 1)),
            **self._maybe(0.2, stop=tuple(rng.sample(["dd", '":', "a", "re", '"', "}"], 2))),
            **self._maybe(0.2, stop_token_ids=tuple(rng.sample(range(30, vocab_size), 8))),
            **self._maybe(0.2, frequency_penalty=rng.choice([1.0, -1.0])),
            **self._maybe(0.2, repetition_penalty=rng.choice([1.3, 0.7])),
            **self._maybe(0.2, logit_bias=bias),
            **self._maybe(0.1, logprobs=rng.randrange(3)),
            **self._maybe(0.1, top_p=0.7),
            **self._maybe(0.1, ignore_eos=True),
        }
        constraint = rng.choice(list(MORE_CONSTRAINTS.values())) if rng.random() < 0.85 else None
        return Request(
            request_id="",
            token_ids=tuple(prompt),
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            constraint=constraint,
            salt=rng.choice(["", "", "a"]),
            path=rng.choice([(), (1,)]),
        )

    def _add(self, name: str, one: Request, at: int) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            one = replace(one, sampling=replace(one.sampling, seed=rng.randrange(9)))
        if rng.random() < 0.25:
            outlook = Outlook(
                program_id=f"p{rng.randrange(3)}",
                constant_tokens=rng.randrange(9),
                generated_tokens=rng.randrange(60),
            )
            path = (rng.randrange(3),)
            one = replace(one, outlook=outlook, goes_on=rng.random() < 0.7, path=path)
        one = replace(one, request_id=name)
        self.asked[name] = one
        self.at[at].append(one)
        if rng.random() < 0.1:
            self.at[at + rng.randrange(1, 12)].append(name)
        if rng.random() < 0.1:
            self.at[at].append(
                ScoreRequest(
                    request_id=f"score {name}",
                    token_ids=one.token_ids,
                    continuations=((40, 50, 60), (40, 51)),
                    salt=one.salt,
                )
            )


def carry_out(
    at: Mapping[int, list[Asked | str]], engine: Engine, model: ReadingModel
) -> dict[str, Outcome]:
    """The outcomes of what is not refused for its length."""
    outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
    last, step = max(at, default=0), 0
    while step <= last or engine.has_work:
        for each in at.get(step, ()):
            if isinstance(each, str):
                engine.abort(each)
                continue
            model.prompts.add(each.token_ids)
            with suppress(InvalidRequest):
                engine.submit(each)
        if step == last:
            for index in range(3):
                engine.end_program(f"p{index}")
        for event in engine.step():
            if not isinstance(event, ScoreEvent):
                outcomes[event.request_id].add(event)
        check_ledger(engine)
        for sequence in engine._scheduler.running:
            num_tokens = len(sequence.token_ids)
            assert sequence.num_computed_tokens <= num_tokens
            if not (isinstance(sequence, GenerationSequence) and sequence.is_canonical):
                assert len(sequence.page_ids) <= engine._kv.num_pages_for(num_tokens)
        step += 1
        assert step < 30_000
    return outcomes


def all_told(outcome: Outcome) -> tuple[object, ...]:
    end, usage = outcome.end, outcome.end.usage
    assert usage is not None
    counts = usage.prompt_tokens, usage.decoded_tokens, usage.forced_tokens
    logprobs = repr([round(logprob, 3) for logprob in outcome.logprobs])  # some are no numbers
    error = repr(end.error)
    return *told([outcome])[0], error, counts, logprobs


class Randomly:
    """Whether steps that took longer are heard of now, or later."""

    def __init__(self, take: Callable[[], list[Found]]) -> None:
        self._take = take
        self._rng = random.Random(1)

    def __call__(self) -> list[Found]:
        return self._take() if self._rng.random() < 0.4 else []


class Erratic:
    """A clock by which no two steps take the same time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._rng = random.Random(2)

    def __call__(self) -> float:
        self._now += self._rng.random() ** 4 / 10
        return self._now


def compare(seed: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Carry out a workload with guesses and without; the engine that guessed."""
    work = Workload(seed)
    words = tokenizer(work.kind)

    def made(**changes: Unpack[EngineOptions]) -> tuple[Engine, ReadingModel]:
        model = ReadingModel(work.depth, words.vocab_size)
        rows = words.vocab_size + 3
        options: EngineOptions = {**work.options, **changes}
        engine, _ = history_engine(
            model, tokenizer=words, vocab_rows=rows, clock=Erratic(), **options
        )
        return engine, model

    outcomes = []
    made_engines = made(), made(max_guesses=0)
    with monkeypatch.context() as patch:
        if work.is_late:
            patch.setattr(following, "_SECONDS_AT_ONCE", 0.0)
        for engine, model in made_engines:
            if work.is_late:
                patch.setattr(engine._following, "take", Randomly(engine._following.take))
            outcomes.append(carry_out(work.at, engine, model))
    mine, wanted = outcomes
    whole = wanted.keys() - work.aborted
    assert mine.keys() - work.aborted == whole
    for name in whole:
        assert all_told(mine[name]) == all_told(wanted[name]), (seed, name)
    (engine, model), (plain, _) = made_engines
    if not work.aborted:
        assert engine.stats().decoded_tokens == plain.stats().decoded_tokens
        assert engine.stats().forced_tokens == plain.stats().forced_tokens

    # What is cached serves requests that go on from there.
    after: list[Asked | str] = [
        Request(
            request_id=name,
            token_ids=(*one.token_ids, *mine[name].token_ids, 40),
            salt=one.salt,
            sampling=SamplingParams(max_tokens=2, temperature=0),
        )
        for name, one in work.asked.items()
        if name in mine
    ]
    model.prompts.clear()
    mine = carry_out({0: after}, engine, model)
    wanted = carry_out({0: after}, *made(prefix_cache=False, host_memory=0))
    assert {n: o.token_ids for n, o in mine.items()} == {n: o.token_ids for n, o in wanted.items()}
    for each, _ in made_engines:
        each._following.close()
    return engine


@pytest.mark.parametrize("seed", range(0, 18, 6))
def test_nothing_depends_on_guesses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [compare(each, monkeypatch) for each in range(seed, seed + 6)]
    assert sum(engine.stats().guessed_tokens for engine in engines) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 500, 40))
def test_nothing_depends_on_guesses_in_many_more(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [compare(each, monkeypatch) for each in range(seed, seed + 40)]
    assert sum(engine.stats().preemptions for engine in engines) > 0
