"""What a constraint forces, in both modes: the tokens drawn, and the tokens of the tokenizer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from palmette.errors import ConstraintTooComplex, UnsupportedConstraint
from palmette.grammar import GrammarTooComplex, Matcher
from palmette.grammar.patience import current_patience
from palmette.protocol import (
    Constraint,
    FinishReason,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenEvent,
)
from palmette.runtime.config import EngineConfig
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.testing import history_engine, tiny_model
from palmette.runtime.tokenization import LoadedTokenizer, load_tokenizer
from tests.runtime.engine.test_engine import Outcome, greedy, run
from tests.runtime.tokenization.tiny import byte_level, loaded, sentencepiece

_WORDS = ["name", "age", "is", "ok", "true", "false", "null", "red", "redder", "blue", "na", "me"]
_MARKS = ['{"', '":', '":"', '","', '"}', "},", '":[', "]}", '""', '","a', "}}", "[{", "1", "12"]


def merges(*, seed: int) -> list[tuple[str, str]]:
    """Merges that make tokens of the words and marks, in a random order where that is possible."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    known = set(map(chr, range(128)))
    for text in rng.sample(_WORDS + _MARKS, len(_WORDS) + len(_MARKS)):
        parts = list(text)
        while len(parts) > 1:
            at = rng.randrange(len(parts) - 1)
            pair = (parts[at], parts[at + 1])
            parts[at : at + 2] = ["".join(pair)]
            if "".join(pair) not in known:
                known.add("".join(pair))
                found.append(pair)
    return found


@cache
def tokenizer(kind: str) -> LoadedTokenizer:
    if kind == "sentencepiece":
        letters = set("".join(_WORDS))
        pairs = [(a, b) for a, b in merges(seed=1) if set(a + b) <= letters]
        return loaded(sentencepiece(merges=tuple(pairs)), stop_token_ids=[2])
    made = byte_level(merges=tuple(merges(seed=len(kind))))
    last = max(token["id"] for token in made["added_tokens"])
    return loaded(made, stop_token_ids=[last])


def engine_of(kind: str, **options: object) -> Engine:
    words = tokenizer(kind)
    config = EngineConfig.of({"num_pages": 256, "page_size": 4, **options})  # type: ignore[typeddict-item]
    model = tiny_model(vocab_rows=words.vocab_size + 3)
    # A clock that stands still: what is guessed depends on no time.
    return Engine.assemble("tiny", model, words, config, clock=lambda: 0.0)


KINDS = ("byte-level", "byte level, other merges", "sentencepiece")

CONSTRAINTS = {
    "object": Constraint.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "age": {"type": "integer", "minimum": 1, "maximum": 199},
                "is": {"enum": ["red", "redder", "blue"]},
                "ok": {"type": "boolean"},
            },
            "required": ["name", "is", "ok"],
            "additionalProperties": False,
        }
    ),
    "array": Constraint.json_schema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"na": {"type": ["string", "null"], "maxLength": 3}},
                "required": ["na"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 3,
        }
    ),
    "choices": Constraint.choices(["redder name", "red nam", "reddest", "blue", "bluené", "blueè"]),
    "regex": Constraint.regex('name": (true|false),? ?("(é|è|[a-z ]){0,4}"){1,2}'),
    "one": Constraint.choices(["name age is ok"]),
}


def request(name: str, constraint: Constraint, seed: int, **sampling: object) -> Request:
    params = {"seed": seed, "max_tokens": 60, "temperature": 1.5, "jump_forward": "canonical"}
    return Request(
        request_id=f"{name}-{seed}",
        token_ids=(104, 105, 58, 10),
        sampling=SamplingParams(**params | sampling),  # type: ignore[arg-type]
        constraint=constraint,
    )


def all_requests(**sampling: object) -> Iterator[Request]:
    for name, constraint in CONSTRAINTS.items():
        for seed in range(6):
            yield request(name, constraint, seed, **sampling)


@pytest.mark.parametrize("kind", KINDS)
def test_canonical_ids_are_the_tokenizers_own_encoding_of_the_text(kind: str) -> None:
    engine = engine_of(kind)
    outcomes = run(engine, *all_requests())
    for outcome in outcomes:
        assert outcome.end.finish_reason is FinishReason.STOP
        assert outcome.token_ids == tokenizer(kind).encode(outcome.text)
    stats = engine.stats()
    assert stats.forced_tokens > 0
    assert stats.saved_passes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_canonical_ids_do_not_depend_on_batch_chunks_cache_or_preemption(kind: str) -> None:
    wanted = {}
    for each in all_requests():
        (outcome,) = run(engine_of(kind), each)
        wanted[each.request_id] = (outcome.token_ids, outcome.text)
    for options in (
        {},
        {"num_pages": 24, "max_batch_tokens": 12},
        {"max_batch_tokens": 3, "max_running": 5},
        {"prefix_cache": False},
    ):
        engine = engine_of(kind, **options)
        for _ in range(2):
            requests = list(all_requests())
            for each, outcome in zip(requests, run(engine, *requests), strict=True):
                assert (outcome.token_ids, outcome.text) == wanted[each.request_id], options
        if "num_pages" in options:
            assert engine.stats().preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_jumps_by_tokens_change_no_id(kind: str) -> None:
    outputs = []
    for jump_forward in (True, False):
        engine = engine_of(kind, jump_forward=jump_forward)
        outcomes = run(engine, *all_requests(jump_forward="token"))
        outputs.append([outcome.token_ids for outcome in outcomes])
        assert (engine.stats().forced_tokens > 0) == jump_forward
    assert outputs[0] == outputs[1]


def test_with_the_tokenizer_of_a_real_model_canonical_ids_are_its_own(smollm2: Path) -> None:
    """Over random logits, which draw what no tokenizer would."""
    words = load_tokenizer(smollm2)
    config = EngineConfig.of({"num_pages": 256})
    engine = Engine.assemble("tiny", tiny_model(vocab_rows=words.vocab_size), words, config)
    outcomes = run(engine, *all_requests())
    num_retaken = 0
    for outcome in outcomes:
        assert outcome.token_ids == words.encode(outcome.text)
        usage = outcome.end.usage
        assert usage is not None
        num_retaken += usage.saved_passes != usage.forced_tokens
    assert num_retaken > 0


def test_canonical_ids_without_jumps_are_the_tokenizers_too() -> None:
    engine = engine_of(KINDS[0], jump_forward=False)
    for outcome in run(engine, *all_requests()):
        assert outcome.token_ids == tokenizer(KINDS[0]).encode(outcome.text)
    assert engine.stats().forced_tokens == 0


def test_an_engine_may_take_the_canonical_mode_for_all_requests_that_do_not_say() -> None:
    engine = engine_of(KINDS[0], jump_mode="canonical")
    for outcome in run(engine, *all_requests(jump_forward=None)):
        assert outcome.token_ids == tokenizer(KINDS[0]).encode(outcome.text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["token", "canonical"])
def test_every_token_has_the_log_probability_that_scoring_finds(kind: str, mode: str) -> None:
    engine = engine_of(kind, max_batch_tokens=16)
    requests = list(all_requests(jump_forward=mode, logprobs=2))
    outcomes = run(engine, *requests)
    assert engine.stats().forced_tokens > 0
    scorer = engine_of(kind)
    for each, outcome in zip(requests, outcomes, strict=True):
        assert len(outcome.logprobs) == len(outcome.token_ids)
        scorer.submit(
            ScoreRequest(
                request_id="score",
                token_ids=each.token_ids,
                continuations=(tuple(outcome.token_ids),),
            )
        )
        events = [event for _ in range(9) if scorer.has_work for event in scorer.step()]
        (event,) = events
        assert isinstance(event, ScoreEvent)
        assert event.result is not None
        assert outcome.logprobs == pytest.approx(event.result.logprobs[0], abs=1e-4)


def test_log_probabilities_change_no_id() -> None:
    plain = [outcome.token_ids for outcome in run(engine_of(KINDS[0]), *all_requests())]
    told = [outcome.token_ids for outcome in run(engine_of(KINDS[0]), *all_requests(logprobs=0))]
    assert plain == told


@pytest.mark.parametrize("mode", ["token", "canonical"])
def test_what_is_told_agrees_at_every_event(mode: str) -> None:
    engine = engine_of(KINDS[0])
    words = tokenizer(KINDS[0])
    for each in all_requests(jump_forward=mode):
        engine.submit(each)
    told: dict[str, tuple[list[int], str]] = {}
    num_events = 0
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            ids, text = told.get(event.request_id, ([], ""))
            ids, text = ids + list(event.token_ids), text + event.text
            told[event.request_id] = ids, text
            assert b"".join(map(words.token_bytes, ids)) == text.encode()
            num_events += 1
    assert num_events > 2 * len(told)


def test_canonical_text_ends_before_a_stop_string_and_is_encoded_to_there() -> None:
    engine = engine_of(KINDS[0])
    found = 0
    for outcome in run(engine, *all_requests(stop=("dd", '":'))):
        assert "dd" not in outcome.text
        assert '":' not in outcome.text
        assert outcome.token_ids == tokenizer(KINDS[0]).encode(outcome.text)
        found += outcome.end.stop_reason in ("dd", '":')
    assert found > 5


def test_within_a_small_budget_canonical_texts_are_complete_and_never_longer() -> None:
    words = tokenizer(KINDS[0])
    engine = engine_of(KINDS[0])
    constraint = CONSTRAINTS["object"]
    shortest = engine.constraints.compile(constraint).shortest_length
    num_canonical = 0
    for room in range(shortest, shortest + 18):
        outcomes = run(
            engine_of(KINDS[0]),
            *(request("object", constraint, n, max_tokens=room) for n in range(6)),
        )
        for outcome in outcomes:
            json.loads(outcome.text)
            assert len(outcome.token_ids) <= room
            num_canonical += outcome.token_ids == words.encode(outcome.text)
    assert num_canonical > 20


def test_a_later_request_finds_the_canonical_tokens_in_the_cache() -> None:
    engine = engine_of(KINDS[0])
    (outcome,) = run(engine, request("object", CONSTRAINTS["object"], 1))
    prompt = (104, 105, 58, 10, *outcome.token_ids, 10)
    after = Request(
        request_id="after", token_ids=prompt, sampling=SamplingParams(max_tokens=1, seed=1)
    )
    (again,) = run(engine, after)
    assert again.end.usage is not None
    # All but what was never fed to the model: the output's forced tail, and the newline.
    assert again.end.usage.cached_tokens >= len(prompt) - 4


def test_usage_tells_forced_tokens_and_passes_that_were_saved() -> None:
    engine = engine_of(KINDS[0])
    (outcome,) = run(engine, request("one", CONSTRAINTS["one"], 0))
    usage = outcome.end.usage
    assert usage is not None
    assert usage.completion_tokens == len(outcome.token_ids)
    assert usage.decoded_tokens == 1
    assert usage.saved_passes == usage.forced_tokens == len(outcome.token_ids) - 1


def test_penalties_count_the_tokens_that_are_there() -> None:
    engine = engine_of(KINDS[0])
    for outcome in run(engine, *all_requests(frequency_penalty=1.0, repetition_penalty=1.3)):
        assert outcome.token_ids == tokenizer(KINDS[0]).encode(outcome.text)


def test_a_backend_that_cannot_tell_forced_bytes_refuses_the_canonical_mode_by_name() -> None:
    engine = engine_of(KINDS[0])
    constraint = Constraint.regex("[ab]{3}", backend="outlines-core")
    with pytest.raises(UnsupportedConstraint, match=r"outlines-core.*canonical"):
        engine.submit(request("a", constraint, 0))
    (outcome,) = run(engine, request("a", constraint, 0, jump_forward="token"))
    assert len(outcome.text) == 3


def test_a_slow_mask_is_made_beside_the_engine_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_held = True
    fill_mask = Matcher.fill_mask

    def slow(matcher: Matcher, row: object, *, budget: int | None = None) -> None:
        while is_held:
            patience = current_patience()
            assert patience is not None
            patience.look()
        fill_mask(matcher, row, budget=budget)  # type: ignore[arg-type]

    monkeypatch.setenv("PALMETTE_GRAMMAR", "python")
    monkeypatch.setattr(Matcher, "fill_mask", slow)
    engine, _ = history_engine(lambda history: {120: 9.0})
    for index in range(3):
        constraint = Constraint.regex(f"[a-z]{{{index + 1}}}")
        engine.submit(greedy(f"slow {index}", f"q{index}\n", constraint=constraint))
    (plain,) = run_until(engine, "plain", greedy("plain", "q\n", max_tokens=30))
    assert plain.text == "x" * 30
    is_held = False
    outcomes: dict[str, Outcome] = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            outcomes.setdefault(event.request_id, Outcome()).add(event)
    assert [outcomes[f"slow {index}"].text for index in range(3)] == ["x", "xx", "xxx"]


def test_aborting_a_request_ends_the_work_on_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []

    def endless(*_: object, **__: object) -> None:
        try:
            while True:
                patience = current_patience()
                assert patience is not None
                patience.look()
        except BaseException as error:
            ended.append(error)
            raise

    monkeypatch.setenv("PALMETTE_GRAMMAR", "python")
    monkeypatch.setattr(Matcher, "fill_mask", endless)
    engine, _ = history_engine(lambda history: {120: 9.0})
    engine.submit(greedy("a", "q\n", constraint=Constraint.regex("[a-z]")))
    engine.step()
    assert len(ended) == 1  # given up at once; the next is under way on another thread
    assert engine.abort("a")
    while len(ended) < 2:
        pass
    assert not engine._following.is_busy


def test_a_mask_that_is_refused_beside_the_engine_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hard(*_: object, **__: object) -> None:
        patience = current_patience()
        assert patience is not None
        if patience.seconds is not None:
            while True:
                patience.look()
        raise GrammarTooComplex("too many states")

    monkeypatch.setenv("PALMETTE_GRAMMAR", "python")
    monkeypatch.setattr(Matcher, "fill_mask", hard)
    engine, _ = history_engine(lambda history: {120: 9.0})
    bad, good = run(
        engine,
        greedy("a", "q\n", constraint=Constraint.regex("[a-z]")),
        greedy("b", "q\n", max_tokens=3),
    )
    assert isinstance(bad.end.error, ConstraintTooComplex)
    assert good.text == "xxx"
    assert not math.isnan(good.end.usage.total_seconds if good.end.usage else math.nan)


def run_until(engine: Engine, name: str, request: Request) -> list[Outcome]:
    engine.submit(request)
    outcome = Outcome()
    for _ in range(1000):
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            assert event.request_id == name
            outcome.add(event)
        if outcome.last is not None:
            return [outcome]
    raise AssertionError(f"{name} did not end")
