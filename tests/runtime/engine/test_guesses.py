"""Guessed tokens: fewer forward passes, and the same ids, counts and pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from palmette.protocol import Constraint, Request
from tests.runtime.engine.test_engine import Outcome, run
from tests.runtime.engine.test_jump_forward import KINDS, all_requests, engine_of, request

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
        {"max_guesses": 3},
        {"max_running": 1},
        {"num_pages": 40, "max_batch_tokens": 16},
        {"max_batch_tokens": 7, "max_running": 4},
        {"prefix_cache": False},
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
        assert unguessed.guessed_tokens == 0
        # Drawn letters that become other tokens teach nothing.
        if mode == "token" or options.get("jump_forward", True):
            assert stats.guessed_tokens > 0
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
