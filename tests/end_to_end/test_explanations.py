"""For every prompt the engine can say which tokens were cached and why the others were not."""

from __future__ import annotations

import pytest

import palmette as pm
from palmette.lang.backends.scripted import ScriptedBackend
from palmette.protocol import PromptStretch, Request, SamplingParams, ScoreRequest, TokenEvent
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.engine import Engine, ScoreEvent
from palmette.runtime.testing import tiny_engine


def ask(engine: Engine, token_ids: list[int], name: str = "r", **options: object):
    request = Request(
        request_id=name,
        token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=2, temperature=0, ignore_eos=True),
        explain=True,
        **options,
    )
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    last = events[-1]
    assert isinstance(last, TokenEvent)
    assert last.usage is not None
    assert not any(event.prompt for event in events[:-1])
    check(last.prompt, len(token_ids), last.usage.cached_tokens)
    return last.prompt


def check(stretches: tuple[PromptStretch, ...], num_tokens: int, num_cached: int) -> None:
    """No gaps, and the cached ones are those that were counted."""
    assert [s.start for s in stretches] == [0, *(s.end for s in stretches[:-1])]
    assert stretches[-1].end == num_tokens
    assert sum(s.end - s.start for s in stretches if s.reason == "cached") == num_cached


def reasons(stretches: tuple[PromptStretch, ...]) -> list[tuple[int, int, str]]:
    return [(s.start, s.end, s.reason) for s in stretches]


def test_a_prompt_that_nobody_asked_before_was_never_seen() -> None:
    assert reasons(ask(tiny_engine(), list(range(40)))) == [(0, 40, "never seen")]


def test_a_repeated_prompt_is_cached_but_for_the_token_whose_logits_are_wanted() -> None:
    engine = tiny_engine()
    ask(engine, list(range(40)))
    found = ask(engine, list(range(40)))
    assert reasons(found) == [(0, 39, "cached"), (39, 40, "needed for its logits")]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_where_a_prompt_goes_on_otherwise_it_diverged_to_the_token(page_size: int) -> None:
    engine = tiny_engine(page_size=page_size)
    ask(engine, list(range(40)))
    found = ask(engine, [*range(21), 99, 98, 97])
    assert reasons(found) == [(0, 21, "cached"), (21, 24, "diverged")]
    assert found[1].detail == "cached prompts go on with other tokens at 21"
    assert str(found[1]).startswith("tokens 21 to 23: diverged (cached")


def test_what_was_evicted_says_when_and_for_whom() -> None:
    now = 100.0
    engine = tiny_engine(num_pages=5)
    engine._kv.cache._clock = lambda: now
    engine._clock = engine._scheduler._clock = lambda: now
    ask(engine, list(range(40)), "first")
    now = 103.0
    ask(engine, list(range(100, 160)), "hungry")
    now = 105.5
    found = ask(engine, list(range(40)), "again")
    evicted = [s for s in found if s.reason == "evicted"]
    assert len(evicted) == 1
    assert evicted[0].end == 40
    assert evicted[0].detail == "2.5 s ago, for hungry"


def test_what_was_flushed_says_so() -> None:
    engine = tiny_engine()
    ask(engine, list(range(40)))
    engine.flush_cache()
    found = ask(engine, list(range(40)))
    assert found[0].reason == "evicted"
    assert found[0].detail.startswith("flushed 0.")


def test_another_salt_is_named_without_spelling_it() -> None:
    engine = tiny_engine()
    ask(engine, list(range(40)), salt="secret")
    found = ask(engine, list(range(40)))
    assert reasons(found) == [(0, 40, "other namespace")]
    assert found[0].detail == "cached for another salt"
    assert "secret" not in str(found)


def test_without_a_cache_that_is_the_reason() -> None:
    found = ask(tiny_engine(prefix_cache=False), list(range(40)))
    assert reasons(found) == [(0, 40, "the prefix cache is off")]


def explained(engine: Engine, *continuations: tuple[int, ...]) -> list[tuple[int, int, str]]:
    """The reasons for the prompt of a score, whose 40 tokens are always the same."""
    request = ScoreRequest(
        request_id="s", token_ids=tuple(range(40)), continuations=continuations, explain=True
    )
    engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    assert isinstance(events[-1], ScoreEvent)
    assert events[-1].result is not None
    return reasons(events[-1].result.prompt)


def test_a_score_explains_its_prompt() -> None:
    engine = tiny_engine()
    ask(engine, list(range(30)))
    found = explained(engine, (1, 2, 3), (4, 5))
    assert found == [(0, 30, "cached"), (30, 40, "diverged")]
    # What is asked after the prompt's last token has to be computed there once more.
    assert explained(engine, (6, 7)) == [(0, 39, "cached"), (39, 40, "needed for its logits")]
    # All of it is known but for what follows a continuation: that is behind the prompt.
    assert explained(engine, (1, 2, 3, 4)) == [(0, 40, "cached")]


def test_nothing_is_explained_that_was_not_asked_for() -> None:
    engine = tiny_engine()
    engine.submit(Request(request_id="r", token_ids=(1, 2, 3)))
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            assert event.prompt == ()


def test_a_program_asks_for_all_its_prompts_at_once() -> None:
    @pm.function
    def program(s: pm.State, name: str) -> None:
        s += "The same for all. " + name + pm.gen("a", max_tokens=3)
        s += pm.select("pick", ["one", "two"])

    with AsyncEngine.over(lambda: tiny_engine()) as engine:
        options = {"backend": engine, "temperature": 0, "ignore_eos": True}
        program.run(name="x", **options)
        state = program.run(name="y", explain=True, **options)
        assert [s.reason for s in state.meta("a")["prompt"]] == ["cached", "diverged"]
        assert state.meta("a")["prompt"][0].end == len("The same for all. ")
        assert state.meta("pick")["prompt"][0].reason == "cached"
        assert "prompt" not in program.run(name="z", **options).meta("a")
        assert "prompt" not in program.run(name="z", explain=None, **options).meta("a")
        (state,) = program.run_batch([{"name": "z"}], explain=True, **options)
        assert state.meta("a")["prompt"][0].reason == "cached"
    with pytest.raises(TypeError, match="explain must be True or False"):
        program.run(name="x", explain="yes")
    unknown = {"explain": True}
    with pytest.raises(TypeError, match="explain"):
        pm.gen("a", **unknown)


def test_the_scripted_backend_explains_as_well() -> None:
    @pm.function
    def program(s: pm.State, name: str) -> None:
        s += "same " + name + pm.gen("a", max_tokens=3) + pm.select("pick", ["one", "two"])

    backend = ScriptedBackend("abc")
    program.run(name="x", backend=backend)
    state = program.run(name="y", backend=backend, explain=True)
    assert reasons(state.meta("a")["prompt"]) == [(0, 5, "cached"), (5, 6, "never seen")]
    assert state.meta("pick")["prompt"][-1].reason == "never seen"
