"""What events tell for a trace: log-probabilities on the way, and which tokens were forced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

import palmette as pm
from palmette.protocol import Request, SamplingParams, TokenLogprob
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine
from tests.runtime.engine.test_engine import Outcome, run
from tests.runtime.engine.test_jump_forward import KINDS, all_requests, engine_of

MODES = ("token", "canonical")


def traced(requests: Sequence[Request]) -> list[Request]:
    return [replace(each, trace_top=5) for each in requests]


def logprobs(outcome: Outcome) -> list[TokenLogprob]:
    return [each for event in outcome.events for each in event.logprobs]


def forced(outcome: Outcome) -> list[bool]:
    """For each token; an event in which none was has nothing to say of it."""
    return [
        flag for event in outcome.events for flag in event.forced or (False,) * len(event.token_ids)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_changes_nothing_and_tells_what_exact_log_probabilities_do(
    kind: str, mode: str
) -> None:
    requests = list(all_requests(jump_forward=mode))
    plain, watched = engine_of(kind), engine_of(kind)
    for _ in range(2):  # the second time with guesses
        wanted, outcomes = run(plain, *requests), run(watched, *traced(requests))
        for one, other in zip(wanted, outcomes, strict=True):
            assert other.token_ids == one.token_ids
            assert other.text == one.text
            assert forced(other) == forced(one)
            assert logprobs(one) == []
            assert len(logprobs(other)) == len(other.token_ids) == len(forced(other))
            assert one.end.usage is not None
            assert sum(forced(one)) == one.end.usage.forced_tokens
    mine, theirs = asdict(watched.stats()), asdict(plain.stats())
    assert mine["guessed_tokens"] > 0
    assert mine == theirs
    asked = [replace(r, sampling=replace(r.sampling, logprobs=5)) for r in requests]
    num_known = 0
    for exact, outcome in zip(run(engine_of(kind), *asked), outcomes, strict=True):
        assert exact.token_ids == outcome.token_ids
        flags = forced(outcome)
        for known, told, is_forced in zip(logprobs(exact), logprobs(outcome), flags, strict=True):
            assert told.token_id == known.token_id
            if math.isnan(told.logprob):
                assert told.top == ()
                assert is_forced or mode == "canonical"
            else:
                assert not is_forced or mode == "canonical"
                assert told.logprob == pytest.approx(known.logprob, abs=1e-4)
                assert [token_id for token_id, _ in told.top] == [i for i, _ in known.top]
                num_known += 1
    assert num_known > 0


def test_without_a_constraint_each_token_has_its_log_probability_and_none_is_forced() -> None:
    request = Request(
        request_id="a", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=8, seed=1)
    )
    (exact,) = run(tiny_engine(), replace(request, sampling=replace(request.sampling, logprobs=5)))
    (told,) = run(tiny_engine(), replace(request, trace_top=5))
    for mine, theirs in zip(logprobs(told), logprobs(exact), strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
    assert told.end.stop_logprob is None
    assert not any(forced(told))


def test_a_traced_run_on_an_engine_makes_the_same_tokens_and_counts() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }

    @pm.function
    def program(s: pm.State) -> None:
        s += "Who? " + pm.gen("who", json_schema=schema, max_tokens=40, temperature=1, seed=3)
        branches = s.fork(3)
        for branch in branches:
            branch += " Say: " + pm.gen("x", max_tokens=8, temperature=1, seed=4, stop="e")
        branches.join()
        s += " So: " + pm.select("y", ["yes", "no"])

    told = []
    for trace in (False, True):
        with AsyncEngine.over(lambda: tiny_engine()) as engine:
            state = program.run(backend=engine, trace=trace)
            (run_trace,) = state.trace().runs
            ids = [e.tokens.ids for b in run_trace.branches for e in b.events if e.tokens]
            told.append((state.text(), ids, run_trace.usage, state["who"], state["x"]))
            who = run_trace.branches[0].events[1]
            assert who.tokens is not None
            assert who.usage is not None
            assert len(who.tokens.forced) == who.usage.forced_tokens > 0
            reasons = {
                stretch.reason
                for branch in run_trace.branches
                for event in branch.events
                if event.prompt is not None
                for stretch in event.prompt.stretches
            }
            assert ("cached" in reasons) == trace
            total = sum(e.usage.prefilled_tokens for e in state.trace().events() if e.usage)
            assert total == run_trace.usage.prefilled_tokens
            computed = sum(node.computed for node in state.trace().prefixes.nodes)
            assert computed <= total  # the options of a select are in no prompt
    assert told[0] == told[1]
