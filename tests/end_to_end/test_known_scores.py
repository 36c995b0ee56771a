"""Log-probabilities live beside the pages: what was scored before is not computed again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.protocol import Request, SamplingParams, ScoreRequest, ScoreResult, TokenEvent
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.testing import tiny_engine

EVERY_PAGE_SIZE = pytest.mark.parametrize("page_size", [1, 4, 16, 64])


def score(
    engine: Engine, prompt: list[int], *continuations: list[int], salt: str = ""
) -> ScoreResult:
    request = ScoreRequest(
        request_id=f"score-{random.random()}",
        token_ids=tuple(prompt),
        continuations=tuple(map(tuple, continuations)),
        salt=salt,
    )
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ScoreEvent):
                assert event.result is not None
                return event.result
    raise AssertionError("no result")


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@EVERY_PAGE_SIZE
@pytest.mark.parametrize("length", [2, 17, 100])
def test_scoring_a_cached_text_computes_one_token(page_size: int, length: int) -> None:
    engine = tiny_engine(page_size=page_size)
    ids = text(0, length)
    first = score(engine, ids[:1], ids[1:])
    assert first.usage.prefilled_tokens == length - 1
    again = score(engine, ids[:1], ids[1:])
    assert again.usage.prefilled_tokens == 1
    assert again.logprobs[0][:-1] == first.logprobs[0][:-1]
    # The last one is computed again, in another batch.
    assert again.logprobs[0][-1] == pytest.approx(first.logprobs[0][-1], abs=1e-4)


@EVERY_PAGE_SIZE
@pytest.mark.parametrize("length", [2, 17, 100])
def test_scores_of_what_was_computed_without_them_are_kept_beside_it(
    page_size: int, length: int
) -> None:
    engine = tiny_engine(page_size=page_size)
    ids = text(0, length)
    request = Request(request_id="g", token_ids=tuple(ids), sampling=SamplingParams(max_tokens=1))
    engine.submit(request)
    while engine.has_work:
        engine.step()
    assert score(engine, ids[:1], ids[1:]).usage.prefilled_tokens == length - 1
    assert score(engine, ids[:1], ids[1:]).usage.prefilled_tokens == 1


@EVERY_PAGE_SIZE
def test_a_longer_text_computes_what_is_new(page_size: int) -> None:
    engine = tiny_engine(page_size=page_size)
    ids = text(1, 60)
    score(engine, ids[:1], ids[1:40])
    longer = score(engine, ids[:1], ids[1:])
    # From the last token of the shorter text on: its probability was known, that after it not.
    assert longer.usage.prefilled_tokens == 59 - 38
    fresh = tiny_engine(page_size=page_size)
    assert longer.logprobs[0] == pytest.approx(score(fresh, ids[:1], ids[1:]).logprobs[0], abs=1e-4)


def test_options_that_were_scored_before_compute_their_last_tokens_only() -> None:
    engine = tiny_engine()
    prompt = text(2, 50)
    options = [text(3, 5), text(4, 6), [*text(3, 2), 7, 8, 9]]
    first = score(engine, prompt, *options)
    again = score(engine, prompt, *options)
    # One token for each option, whose probability after it is of a token that nobody computed.
    assert again.usage.prefilled_tokens == 3
    for one, other in zip(first.logprobs, again.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_what_was_generated_with_logprobs_is_known_to_a_score() -> None:
    engine = tiny_engine()
    prompt = text(5, 30)
    sampling = SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True, temperature=1, seed=1)
    engine.submit(Request(request_id="g", token_ids=tuple(prompt), sampling=sampling))
    produced: list[int] = []
    said: list[float] = []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            produced += event.token_ids
            said += [entry.logprob for entry in event.logprobs]
    result = score(engine, prompt, produced)
    assert result.logprobs[0] == pytest.approx(said, abs=1e-4)
    assert result.usage.prefilled_tokens == 1


def test_what_a_generation_has_found_is_known_while_it_still_runs() -> None:
    engine = tiny_engine(page_size=4)
    sampling = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True, temperature=1, seed=1)
    prompt = text(8, 8)
    engine.submit(Request(request_id="g", token_ids=tuple(prompt), sampling=sampling))
    produced: list[int] = []
    while len(produced) < 12:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            produced += event.token_ids
    result = score(engine, prompt, produced[:8])
    assert result.usage.prefilled_tokens == 1
    assert engine.stats().num_running == 1


def test_another_salt_knows_nothing() -> None:
    engine = tiny_engine()
    ids = text(6, 40)
    score(engine, ids[:1], ids[1:], salt="a")
    assert score(engine, ids[:1], ids[1:], salt="b").usage.prefilled_tokens == 39
    assert score(engine, ids[:1], ids[1:], salt="a").usage.prefilled_tokens == 1


def test_evicted_pages_take_what_was_known_with_them() -> None:
    engine = tiny_engine()
    ids = text(7, 40)
    first = score(engine, ids[:1], ids[1:])
    engine.flush_cache()
    again = score(engine, ids[:1], ids[1:])
    assert again.usage.prefilled_tokens == 39
    assert again.logprobs == first.logprobs


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 3, 8]))
def test_whatever_was_scored_before_the_numbers_are_those_of_a_fresh_engine(
    seed: int, page_size: int
) -> None:
    rng = random.Random(seed)
    engine = tiny_engine(page_size=page_size, num_pages=120 // page_size)
    fresh = tiny_engine(page_size=16)
    known: list[list[int]] = [[1]]
    for _ in range(8):
        base = rng.choice(known)
        ids = base[: rng.randrange(1, len(base) + 1)]
        ids += [rng.randrange(4) for _ in range(rng.randrange(2, 12))]
        known.append(ids[:40])
        cut = rng.randrange(1, len(known[-1]))
        prompt, rest = known[-1][:cut], known[-1][cut:]
        options = [rest, *([[*rest[:1], 5], [6]] if rng.random() < 0.5 else [])]
        found = score(engine, prompt, *options)
        fresh.flush_cache()
        expected = score(fresh, prompt, *options)
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_what_a_score_request_computes_twice_is_no_prefill() -> None:
    """Each path alone in the engine; what they share is dropped from the cache in between."""
    engine = tiny_engine(page_size=4, max_running=1)
    request = ScoreRequest(
        request_id="a",
        token_ids=tuple(text(7, 40)),
        continuations=((1, 2, 3), (1, 4, 5), (6, 7)),
    )
    engine.submit(request)
    events: list[TokenEvent | ScoreEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.flush_cache()
    [event] = events
    assert isinstance(event, ScoreEvent)
    assert event.result is not None
    usage = event.result.usage
    # The prompt and the nodes 1, 1 2, 1 4 and 6 of the continuations' tree, once each.
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens) == (44, 0, 44)
    assert usage.recomputed_tokens == engine.stats().computed_tokens - 44
    assert usage.recomputed_tokens == 40 + 41
