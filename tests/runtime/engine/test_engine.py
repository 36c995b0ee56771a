"""The engine on models whose next token is a function of what they read back from the pages."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import (
    ConstraintTooComplex,
    InvalidConstraint,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    UnsupportedConstraint,
)
from palmette.grammar import GrammarTooComplex, Matcher
from palmette.protocol import (
    Constraint,
    FinishReason,
    JumpMode,
    Piece,
    Request,
    SamplingParams,
    ScoreRequest,
    ScoreResult,
    TokenEvent,
)
from palmette.radix_cache.invariants import check
from palmette.runtime.config import EngineConfig, EngineOptions
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.model import Model
from palmette.runtime.testing import history_engine, script, tiny_engine, tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


class Outcome:
    """All events of one request, put together."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.chunks: list[str] = []
        self.logprobs: list[float] = []
        self.events: list[TokenEvent] = []
        self.last: TokenEvent | None = None

    def add(self, event: TokenEvent) -> None:
        assert self.last is None, "an event after the last"
        self.events.append(event)
        self.token_ids += event.token_ids
        self.text += event.text
        self.chunks.append(event.text)
        self.logprobs += [entry.logprob for entry in event.logprobs]
        if event.finish_reason is not None:
            self.last = event

    @property
    def end(self) -> TokenEvent:
        assert self.last is not None
        return self.last


def run(engine: Engine, *requests: Request) -> list[Outcome]:
    for request in requests:
        engine.submit(request)
    outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
    for _ in range(20_000):
        if not engine.has_work:
            break
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            outcomes[event.request_id].add(event)
        check_ledger(engine)
    return [outcomes[request.request_id] for request in requests]


def score(engine: Engine, request: ScoreRequest) -> ScoreResult:
    engine.submit(request)
    results = []
    while engine.has_work:
        results += engine.step()
    assert len(results) == 1
    assert isinstance(results[0], ScoreEvent)
    assert results[0].result is not None
    return results[0].result


def check_ledger(engine: Engine) -> None:
    page_size = engine._kv.page_size
    owned: list[int] = []
    for sequence in engine._scheduler.running:
        held = 0 if sequence.lease is None else sequence.lease.num_tokens // page_size
        owned += sequence.page_ids[held:]
    check(engine._kv.cache, owned=owned)


def assert_idle(engine: Engine) -> None:
    """Nothing is held but the cache, and that goes when told to."""
    check_ledger(engine)
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    engine.flush_cache()
    assert engine.stats().num_free_pages == engine.stats().num_pages


def greedy(name: str, text: str, **options: object) -> Request:
    constraint = options.pop("constraint", None)
    sampling = SamplingParams(temperature=0, **options)  # type: ignore[arg-type]
    return Request(
        request_id=name,
        token_ids=ids(text),
        sampling=sampling,
        constraint=constraint,  # type: ignore[arg-type]
    )


def test_text_and_ids_agree_and_end_at_the_stop_token() -> None:
    engine, _ = history_engine(script("hello"))
    (outcome,) = run(engine, greedy("a", "say\n"))
    assert outcome.text == "hello"
    assert outcome.token_ids == list(b"hello")
    assert outcome.end.finish_reason is FinishReason.STOP
    assert outcome.end.stop_reason == 258
    usage = outcome.end.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.prefilled_tokens, usage.decoded_tokens) == (4, 4, 6)


def test_max_tokens_ends_with_length() -> None:
    engine, _ = history_engine(script("hello"))
    (outcome,) = run(engine, greedy("a", "say\n", max_tokens=3))
    assert outcome.text == "hel"
    assert outcome.end.finish_reason is FinishReason.LENGTH


def test_max_tokens_of_zero_only_fills_the_cache() -> None:
    engine, model = history_engine(script("hello"))
    first, second = (
        run(engine, greedy("a", "a prompt\n", max_tokens=0))[0],
        run(engine, greedy("b", "a prompt\n", max_tokens=1))[0],
    )
    assert first.text == ""
    assert first.end.finish_reason is FinishReason.LENGTH
    assert second.text == "h"
    assert model.num_computed == 9 + 1


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["Par"], "The capital is "),
        (["Pari"], "The capital is "),
        (["is."], "The capital is Par"),
        ([" is Paris"], "The capital"),
        (["zzz", "s. N"], "The capital is Pari"),
    ],
)
def test_a_stop_string_is_cut_off_and_never_shown(stop: list[str], text: str) -> None:
    engine, _ = history_engine(script("The capital is Paris. Next"))
    (outcome,) = run(engine, greedy("a", "q\n", stop=tuple(stop)))
    assert outcome.text == text
    assert bytes(outcome.token_ids).decode() == text
    assert outcome.end.finish_reason is FinishReason.STOP
    assert outcome.end.stop_reason in stop


def test_what_follows_a_stopped_text_reuses_what_was_kept() -> None:
    engine, model = history_engine(script("ab,cd;ef"), page_size=4)
    (outcome,) = run(engine, greedy("a", "q\n", stop=(",cd;",)))
    before = model.num_computed
    follow = Request(
        request_id="b",
        token_ids=(*ids("q\n"), *outcome.token_ids, *ids("END\n")),
        sampling=SamplingParams(temperature=0, max_tokens=1),
    )
    run(engine, follow)
    assert model.num_computed - before == len("END\n")


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    engine, _ = history_engine(script("é東🚲"))
    (outcome,) = run(engine, greedy("a", "q\n"))
    assert [chunk for chunk in outcome.chunks if chunk] == ["é", "東", "🚲"]


def test_text_that_ends_inside_a_character_ends_with_one_replacement() -> None:
    engine, _ = history_engine(script("ok🚲"))
    (outcome,) = run(engine, greedy("a", "q\n", max_tokens=4))
    assert outcome.text == "ok\ufffd"
    assert outcome.token_ids == list("ok🚲".encode()[:4])


def test_min_tokens_forbids_the_stop_token_until_then() -> None:
    engine, _ = history_engine(script("hi"))
    (outcome,) = run(engine, greedy("a", "q\n", min_tokens=5, max_tokens=8))
    assert len(outcome.token_ids) >= 5


def test_ignore_eos_goes_on_to_max_tokens_but_minds_the_requests_own_stop_tokens() -> None:
    engine, _ = history_engine(script("hi"))
    plain, own = run(
        engine,
        greedy("a", "q\n", ignore_eos=True, max_tokens=20),
        greedy("b", "q\n", ignore_eos=True, stop_token_ids=(ord("i"),), max_tokens=20),
    )
    assert len(plain.token_ids) == 20
    assert plain.end.finish_reason is FinishReason.LENGTH
    assert own.text == "h"
    assert own.end.stop_reason == ord("i")


def test_padding_rows_of_the_head_are_never_drawn() -> None:
    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        return {270: 30.0, 271: 29.0, 65: 5.0}

    engine, _ = history_engine(logits_of, vocab_rows=272)
    outcomes = run(
        engine,
        greedy("a", "q", max_tokens=4),
        Request(request_id="b", token_ids=ids("q"), sampling=SamplingParams(max_tokens=50)),
        greedy("c", "q", max_tokens=4, constraint=Constraint.regex("[A-Z]+")),
    )
    assert outcomes[0].text == "AAAA"
    assert all(token_id < 259 for outcome in outcomes for token_id in outcome.token_ids)
    assert outcomes[2].text == "AAAA"


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    engine, _ = history_engine(lambda history: {65: 1.0, 66: 0.0, 67: -1.0})
    (outcome,) = run(engine, greedy("a", "q", max_tokens=2, logprobs=3))
    total = math.log(math.e + 1 + math.exp(-1) + 256)
    assert outcome.logprobs == pytest.approx([1 - total] * 2, abs=1e-6)
    assert outcome.end.logprobs[0].top[0] == (65, pytest.approx(1 - total, abs=1e-6))


def test_a_token_cut_by_a_stop_string_has_no_logprob() -> None:
    engine, _ = history_engine(script("a🚲b"))
    (outcome,) = run(engine, greedy("a", "q\n", stop=("b",), logprobs=0))
    assert len(outcome.logprobs) == len(outcome.token_ids)
    assert not any(math.isnan(value) for value in outcome.logprobs)


def test_forced_tokens_are_appended_without_a_decode_step() -> None:
    constraint = Constraint.regex("yes, of course (A|B)!")
    engine, _ = history_engine(lambda history: {66: 9.0}, page_size=4)
    (outcome,) = run(engine, greedy("a", "q", constraint=constraint))
    assert outcome.text == "yes, of course B!"
    usage = outcome.end.usage
    assert usage is not None
    # The first token is drawn (it is the only legal one), then all is forced but the choice.
    assert (usage.decoded_tokens, usage.forced_tokens) == (2, len(outcome.text) - 2)


def test_jump_forward_changes_no_id() -> None:
    constraint = Constraint.json_schema(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
            "required": ["name", "ok"],
            "additionalProperties": False,
        }
    )
    outputs = []
    for jump_forward in (True, False):
        engine = tiny_engine(jump_forward=jump_forward)
        requests = [
            Request(
                request_id=str(seed),
                token_ids=ids("q"),
                sampling=SamplingParams(seed=seed, max_tokens=60),
                constraint=constraint,
            )
            for seed in range(8)
        ]
        outputs.append([outcome.token_ids for outcome in run(engine, *requests)])
        assert (engine.stats().forced_tokens > 0) == jump_forward
    assert outputs[0] == outputs[1]


def test_a_constraint_that_cannot_be_met_within_max_tokens_is_refused_with_the_length() -> None:
    engine, _ = history_engine(script("x"))
    with pytest.raises(InvalidRequest, match="takes 10 tokens, there is room for 4"):
        engine.submit(greedy("a", "q", max_tokens=4, constraint=Constraint.regex("[a-z]{10}")))
    assert not engine.has_work


def test_at_the_end_of_the_budget_a_constrained_text_is_complete() -> None:
    engine, _ = history_engine(lambda history: {ord("["): 9.0, ord("1"): 5.0})
    schema = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    for room in range(2, 12):
        (outcome,) = run(
            engine,
            greedy(f"a{room}", "q", max_tokens=room, constraint=Constraint.json_schema(schema)),
        )
        assert outcome.text.count("[") == outcome.text.count("]") > 0


@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        (Constraint.regex("(a"), InvalidConstraint, "regex: "),
        (Constraint.regex(r"(a|b)\1"), UnsupportedConstraint, "regex: "),
        (Constraint.json_schema("{"), InvalidConstraint, "json_schema: "),
    ],
)
def test_a_bad_constraint_is_refused_and_the_engine_goes_on(
    constraint: Constraint, error: type[Exception], message: str
) -> None:
    engine, _ = history_engine(script("fine"))
    with pytest.raises(error, match=message):
        engine.submit(greedy("a", "q\n", constraint=constraint))
    assert run(engine, greedy("a", "q\n"))[0].text == "fine"


@pytest.mark.parametrize("act", ["fill_mask", "accept", "forced_tokens"])
def test_a_constraint_that_grows_too_complex_ends_its_own_request_only(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever use of the grammar finds it."""
    monkeypatch.setenv("PALMETTE_GRAMMAR", "python")

    def refuse(*_: object, **__: object) -> None:
        raise GrammarTooComplex("too many states")

    engine, _ = history_engine(script("fine"))
    engine.submit(greedy("other", "q\n"))
    engine.submit(greedy("a", "q\n", constraint=Constraint.regex("[a-z]{1,9}")))
    monkeypatch.setattr(Matcher, act, refuse)
    outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            outcomes[event.request_id].add(event)
    assert outcomes["other"].text == "fine"
    assert outcomes["a"].end.finish_reason is FinishReason.ERROR
    assert isinstance(outcomes["a"].end.error, ConstraintTooComplex)
    assert "regex: too many states" in str(outcomes["a"].end.error)
    assert_idle(engine)


def test_a_request_that_spends_too_long_on_its_constraint_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("palmette.runtime.constraints._REQUEST_SECONDS", 0.0)
    monkeypatch.setattr("palmette.runtime.constraints._TOKEN_SECONDS", 0.0)
    engine, _ = history_engine(script("fine"))
    bad, good = run(
        engine,
        greedy("a", "q\n", constraint=Constraint.regex("[a-z]{1,9}")),
        greedy("b", "q\n"),
    )
    assert isinstance(bad.end.error, ConstraintTooComplex)
    assert "processor time" in str(bad.end.error)
    assert good.text == "fine"
    assert_idle(engine)


def test_requests_that_cannot_be_served_say_why() -> None:
    engine, _ = history_engine(script("x"), max_context=32, num_pages=1, page_size=16)
    with pytest.raises(PromptTooLong, match="prompt has 40 tokens, the model takes at most 32"):
        engine.submit(greedy("a", "x" * 40))
    with pytest.raises(RequestTooLarge, match="needs 2 pages of 16 tokens, the KV pool has 1"):
        engine.submit(greedy("a", "x" * 20))
    with pytest.raises(InvalidRequest, match="token id 300 is outside the vocabulary of 259"):
        engine.submit(Request(request_id="a", token_ids=(1, 300)))
    with pytest.raises(InvalidRequest, match="logit_bias names token 999"):
        engine.submit(greedy("a", "x", logit_bias=((999, 1.0),)))
    engine.submit(greedy("a", "x\n"))
    with pytest.raises(InvalidRequest, match="request id 'a' is in use"):
        engine.submit(greedy("a", "x\n"))


def test_a_request_that_outgrows_the_pool_ends_and_the_next_is_served() -> None:
    engine, _ = history_engine(script("x" * 300, then=None), num_pages=4, page_size=16)
    (outcome,) = run(engine, greedy("a", "q" * 39 + "\n", max_tokens=200, ignore_eos=True))
    assert outcome.end.finish_reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == 64 - 40
    (after,) = run(engine, greedy("b", "q\n", max_tokens=5))
    assert after.text == "xxxxx"
    assert_idle(engine)


def test_a_request_ends_at_the_models_context() -> None:
    engine, _ = history_engine(script("x" * 300, then=None), max_context=32)
    (outcome,) = run(engine, greedy("a", "q\n", max_tokens=200))
    assert len(outcome.token_ids) == 30
    assert outcome.end.finish_reason is FinishReason.LENGTH


def test_abort_gives_everything_back() -> None:
    engine, _ = history_engine(script("x" * 300, then=None))
    engine.submit(greedy("a", "q\n", max_tokens=200))
    engine.submit(greedy("b", "q\n", max_tokens=3))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("nobody")
    events = []
    while engine.has_work:
        events += engine.step()
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason}  # type: ignore[union-attr]
    assert ends == {"a": FinishReason.ABORT, "b": FinishReason.LENGTH}
    assert_idle(engine)


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_an_aborted_prompt_leaves_only_what_was_computed(num_chunks: int) -> None:
    engine, model = history_engine(script("answer"), page_size=1, max_batch_tokens=16)
    prompt = "p" * 63 + "\n"
    engine.submit(greedy("a", prompt))
    for _ in range(num_chunks):
        engine.step()
    engine.abort("a")
    engine.step()
    before = model.num_computed
    (outcome,) = run(engine, greedy("b", prompt))
    assert outcome.text == "answer"
    usage = outcome.end.usage
    assert usage is not None
    assert usage.cached_tokens == 16 * num_chunks
    assert model.num_computed - before == 64 - 16 * num_chunks + len("answer")


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    broken = True

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        if broken:
            raise RuntimeError("out of memory")
        return {65: 1.0}

    engine, _ = history_engine(logits_of)
    (outcome,) = run(engine, greedy("a", "q"))
    assert outcome.end.finish_reason is FinishReason.ERROR
    assert "out of memory" in str(outcome.end.error)
    broken = False
    assert run(engine, greedy("b", "q", max_tokens=2))[0].text == "AA"
    assert_idle(engine)


def test_equal_prompts_in_one_batch_are_prefilled_once() -> None:
    engine, model = history_engine(script("hi"), page_size=4)
    outcomes = run(engine, *[greedy(str(i), "a prompt of twenty\n") for i in range(5)])
    assert {outcome.text for outcome in outcomes} == {"hi"}
    # The others compute the last prompt token again, for its logits, and all compute "h", "i".
    assert model.num_computed == 19 + 4 * 1 + 5 * 2


def test_a_miss_is_explained() -> None:
    engine, _ = history_engine(script("hi"), page_size=4)
    run(engine, greedy("a", "a prompt of twenty\n"))
    told = str(engine.explain(ids("a prompt of thirty\n")))
    assert "13 of 19 tokens are cached" in told
    assert "diverged at token 13" in told
    engine.flush_cache()
    assert "flushed" in str(engine.explain(ids("a prompt of twenty\n")))
    assert "never seen" in str(engine.explain(ids("something else\n")))


def test_salts_do_not_share() -> None:
    engine, model = history_engine(script("hi"))
    for index, salt in enumerate(["", "a", "b", "a"]):
        request = Request(
            request_id=str(index),
            token_ids=ids("a prompt\n"),
            sampling=SamplingParams(temperature=0, max_tokens=1),
            salt=salt,
        )
        run(engine, request)
    assert model.num_computed == 3 * 9 + 1


def test_scores_are_conditional_logprobs_along_each_continuation() -> None:
    table = {
        (): {"Y": 0.6, "N": 0.4},
        ("Y",): {"N": 0.1, "Y": 0.9},
        ("N",): {"Y": 0.8, "N": 0.2},
    }

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        path = tuple(chr(token_id) for token_id in history[1:])
        logits = dict.fromkeys(range(259), -200.0)
        logits.update({ord(k): math.log(p) for k, p in table[path].items()})
        return logits

    engine, model = history_engine(logits_of)
    request = ScoreRequest(
        request_id="s", token_ids=ids("q"), continuations=(ids("YN"), ids("NY"), ids("Y"))
    )
    result = score(engine, request)
    probabilities = [math.exp(sum(values)) for values in result.logprobs]
    assert probabilities == pytest.approx([0.06, 0.32, 0.6], abs=1e-6)
    # The prompt, and the inner nodes "Y" and "N", once each.
    assert model.num_computed == 3
    assert (result.usage.prompt_tokens, result.usage.prefilled_tokens) == (3, 3)


@settings(deadline=None, max_examples=60)
@given(
    continuations=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8
    ),
    page_size=st.sampled_from([1, 3, 16]),
    max_batch_tokens=st.sampled_from([2, 64]),
)
def test_scoring_computes_each_inner_node_once_and_equals_one_by_one(
    continuations: list[tuple[int, ...]], page_size: int, max_batch_tokens: int
) -> None:
    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        rng = random.Random(repr(history))
        return {token_id: rng.uniform(-3, 3) for token_id in range(4)}

    engine, model = history_engine(
        logits_of, page_size=page_size, max_batch_tokens=max_batch_tokens
    )
    prompt = (7, 8, 9, 7, 8)
    together = score(
        engine,
        ScoreRequest(request_id="all", token_ids=prompt, continuations=tuple(continuations)),
    )
    inner = {c[:depth] for c in continuations for depth in range(1, len(c))}
    assert model.num_computed == len(prompt) + len(inner)
    assert_idle(engine)
    for continuation, logprobs in zip(continuations, together.logprobs, strict=True):
        alone = score(
            engine,
            ScoreRequest(request_id="one", token_ids=prompt, continuations=(continuation,)),
        )
        assert logprobs == pytest.approx(alone.logprobs[0], abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    continuations=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=6
    ),
    num_top=st.integers(1, 100),
    page_size=st.sampled_from([1, 3, 16]),
)
def test_scoring_tells_the_likeliest_tokens_of_every_place_cold_and_warm(
    continuations: list[tuple[int, ...]], num_top: int, page_size: int
) -> None:
    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        rng = random.Random(repr(history))
        return {token_id: rng.uniform(-3, 3) for token_id in range(40)}

    engine, model = history_engine(logits_of, page_size=page_size)
    prompt = (7, 8, 9, 7, 8)
    for run_index in range(2):
        result = score(
            engine,
            ScoreRequest(
                request_id=str(run_index),
                token_ids=prompt,
                continuations=tuple(continuations),
                num_top=num_top,
            ),
        )
        for continuation, values, tops in zip(
            continuations, result.logprobs, result.top, strict=True
        ):
            for depth, (value, top) in enumerate(zip(values, tops, strict=True)):
                logits = logits_of(prompt + continuation[:depth])
                known = [logits.get(token_id, 0.0) for token_id in range(model.vocab_rows)]
                order = sorted(range(len(known)), key=lambda i: (-known[i], i))
                assert [token_id for token_id, _ in top] == order[:num_top]
                norm = math.log(sum(map(math.exp, known)))
                assert [p for _, p in top] == pytest.approx(
                    [known[i] - norm for i in order[:num_top]], abs=1e-5
                )
                assert dict(top).get(continuation[depth], value) == value
    assert_idle(engine)


def test_scoring_without_num_top_tells_no_likeliest_tokens() -> None:
    engine, _ = history_engine(lambda history: {})
    request = ScoreRequest(request_id="s", token_ids=(1,), continuations=((2, 3),))
    assert score(engine, request).top == ()
    for wrong in (-1, 101):
        with pytest.raises(InvalidRequest, match="num_top must be an integer of at least 0"):
            replace(request, num_top=wrong)


@pytest.mark.parametrize("constraint", [None, Constraint.regex("a*")])
@pytest.mark.parametrize("jump_forward", ["token", "canonical"])
def test_a_stop_token_has_its_log_probability(
    constraint: Constraint | None, jump_forward: JumpMode
) -> None:
    end = 258

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        return {end: 5.0} if history[-2:] == ids("aa") else {ord("a"): 5.0}

    engine, _ = history_engine(logits_of)
    for num_top in (None, 2):
        sampling = SamplingParams(
            temperature=0, logprobs=num_top, max_tokens=9, jump_forward=jump_forward
        )
        request = Request(
            request_id="r", token_ids=ids("q"), sampling=sampling, constraint=constraint
        )
        (outcome,) = run(engine, request)
        assert (outcome.text, outcome.end.stop_reason) == ("aa", end)
        found = outcome.end.stop_logprob
        if num_top is None:
            assert found is None
            continue
        assert found is not None
        assert found.token_id == end
        norm = math.log(math.exp(5) + engine.tokenizer.vocab_size - 1)
        assert found.logprob == pytest.approx(5 - norm, abs=1e-5)
        assert [token_id for token_id, _ in found.top] == [end, 0]


@settings(deadline=None, max_examples=60)
@given(
    lists=st.lists(
        st.lists(
            st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=5
        ),
        min_size=2,
        max_size=4,
    ),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_scores_of_several_requests_at_once_compute_nothing_twice(
    lists: list[list[tuple[int, ...]]], page_size: int
) -> None:
    """Whichever path the scheduler takes first."""
    engine, model = history_engine(lambda history: {len(history) % 5: 2.0}, page_size=page_size)
    places: set[tuple[int, ...]] = set()
    for index, continuations in enumerate(lists):
        prompt = (7, 8, 9, 20 + index)
        engine.submit(
            ScoreRequest(
                request_id=str(index), token_ids=prompt, continuations=tuple(continuations)
            )
        )
        computed = [prompt + c[:depth] for c in continuations for depth in range(len(c))]
        places |= {tokens[:end] for tokens in computed for end in range(1, len(tokens) + 1)}
    results = []
    while engine.has_work:
        results += engine.step()
        check_ledger(engine)
    assert len(results) == len(lists)
    assert model.num_computed == len(places)


def mixed_requests(num_requests: int) -> list[Request]:
    rng = random.Random(5)
    shared = "You answer in one word. " * 4
    requests = []
    for index in range(num_requests):
        text = (shared if index % 3 else "") + "".join(
            rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 60))
        )
        sampling = SamplingParams(
            temperature=0.0 if index % 2 else 0.9,
            seed=index,
            max_tokens=24,
            top_p=0.9 if index % 5 == 0 else 1.0,
            repetition_penalty=1.2 if index % 7 == 0 else 1.0,
        )
        requests.append(
            Request(request_id=str(index), token_ids=ids(text), sampling=sampling, path=(index,))
        )
    return requests


def outputs_of(engine: Engine, requests: list[Request], *, together: bool) -> list[list[int]]:
    if together:
        return [outcome.token_ids for outcome in run(engine, *requests)]
    return [run(engine, request)[0].token_ids for request in requests]


@pytest.fixture(scope="module")
def expected_ids() -> list[list[int]]:
    """Each of `mixed_requests` alone on a fresh engine with room for all."""
    return outputs_of(tiny_engine(), mixed_requests(18), together=False)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("max_batch_tokens", [7, 64, 4096])
@pytest.mark.parametrize("num_pages", ["large", "tight"])
def test_the_same_ids_whatever_the_batch_chunks_cache_and_preemption(
    page_size: int, max_batch_tokens: int, num_pages: str, expected_ids: list[list[int]]
) -> None:
    requests, expected = mixed_requests(18), expected_ids
    longest = max(len(r.token_ids) for r in requests) + 24
    pages = 4096 // page_size if num_pages == "large" else -(-longest // page_size) + 2
    engine = tiny_engine(page_size=page_size, max_batch_tokens=max_batch_tokens, num_pages=pages)
    cold = outputs_of(engine, requests, together=True)
    assert cold == expected
    if num_pages == "tight":
        assert engine.stats().preemptions > 0
    assert outputs_of(engine, requests, together=True) == expected
    assert_idle(engine)


class Timed:
    """A model whose forward passes take 1 ms, and 1 ms for each token, by a clock of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.now = 0.0
        self.batch_sizes: list[int] = []
        self.sizes_beside: list[int] = []  # of batches in which some sequence computes one token

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        self.batch_sizes.append(batch.num_tokens)
        if 1 in [end - start for start, end in itertools.pairwise(batch.query_starts)]:
            self.sizes_beside.append(batch.num_tokens)
        self.now += 1e-3 * (1 + batch.num_tokens)
        return self._model.forward(batch, kv)


@pytest.mark.parametrize("max_step_seconds", [None, 0.0, 0.02, 0.04])
def test_chunks_that_fit_a_time_change_no_ids(
    max_step_seconds: float | None, expected_ids: list[list[int]]
) -> None:
    loaded = tiny_model()
    timed = Timed(loaded.model)
    options = EngineOptions(max_batch_tokens=256, max_running=8, max_step_seconds=max_step_seconds)
    engine = Engine.assemble(
        "tiny",
        replace(loaded, model=timed),
        ByteTokenizer(),
        EngineConfig.of({"num_pages": 256, "prefix_cache": False, **options}),
        clock=lambda: timed.now,
    )
    requests = [
        replace(each, sampling=replace(each.sampling, max_tokens=4 + 5 * (index % 5)))
        for index, each in enumerate(mixed_requests(18))
    ]
    outputs = outputs_of(engine, requests, together=True)
    assert outputs == [
        expected[: request.sampling.max_tokens]
        for expected, request in zip(expected_ids, requests, strict=True)
    ]
    # Eight prompts at once to begin with, and later newcomers beside those that decode.
    assert max(timed.batch_sizes[:3]) > 100
    longest = 1e-3 * (1 + max(timed.sizes_beside[10:]))
    if max_step_seconds is None:
        assert longest > 0.06
    else:
        assert longest <= max(1e-3 * (1 + 8 + 16), 1.1 * max_step_seconds)
    assert_idle(engine)


def test_seeds_are_fresh_unless_given() -> None:
    engine = tiny_engine()
    request = {"token_ids": ids("uuid:"), "sampling": SamplingParams(max_tokens=32)}
    texts = {
        tuple(run(engine, Request(request_id=str(i), **request))[0].token_ids)  # type: ignore[arg-type]
        for i in range(10)
    }
    assert len(texts) >= 8


def test_special_pieces_become_control_tokens() -> None:
    engine, _ = history_engine(script("x"))
    encoded = engine.tokenizer.encode([Piece("<|turn|>", special=True), Piece("<|turn|>")])
    assert encoded == [257, *b"<|turn|>"]
