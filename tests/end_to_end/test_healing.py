"""Healed prompts on an engine: what is drawn is what the model itself would, over the boundary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.errors import UnsupportedConstraint
from palmette.lang.healing import index_of
from palmette.protocol import Constraint, Request, SamplingParams, TokenEvent
from palmette.radix_cache import invariants
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.engine import Engine, Event
from palmette.runtime.recording import Recording
from tests.end_to_end.tiny_bpe import (
    async_engine,
    bpe_engine,
    next_logprobs,
    spelled,
    tokenizer,
)

TOKENS = tokenizer()
TABLE = TOKENS.all_token_bytes()
PROMPTS = st.lists(
    st.sampled_from(["http", ":", " th", "e", " a", "b", "é", "\n", "x", '"', "🐈"]),
    min_size=1,
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with async_engine() as engine:
        yield engine


@pm.function
def go_on(s: pm.State, prompt: str, **options: Any) -> None:
    s += prompt + pm.gen("x", boundary="heal", **options)


def taken_back(prompt: str) -> tuple[tuple[int, ...], str]:
    """Where the language has the prompt end, and the text behind it."""
    ids = tuple(TOKENS.encode(prompt))
    tokens = [TABLE[token_id] for token_id in ids[1:]]
    num = index_of(TOKENS).num_to_take_back(tokens, len(prompt.encode()))
    return ids[: len(ids) - num], TOKENS.decode(ids[len(ids) - num :])


def best_tokens(ids: tuple[int, ...], healed: bytes, count: int) -> list[int]:
    """Greedy decoding by the reference, every step alone; first of those that go with `healed`."""
    out: list[int] = []
    rest = healed
    while len(out) < count:
        logprobs = next_logprobs((*ids, *out)).clone()
        if rest:
            allowed = torch.tensor(
                [bool(t) and (rest.startswith(t) or t.startswith(rest)) for t in TABLE]
            )
            logprobs[: len(TABLE)][~allowed] = -torch.inf
        out.append(int(logprobs[: len(TABLE)].argmax()))
        rest = rest[len(TABLE[out[-1]]) :]
    return out


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=PROMPTS)
def test_greedy_tokens_over_the_boundary_are_those_that_the_model_prefers(
    engine: AsyncEngine, prompt: str
) -> None:
    state = go_on.run(prompt, max_tokens=4, temperature=0, ignore_eos=False, backend=engine)
    ids, healed = taken_back(prompt)
    meta = state.meta("x")
    assert meta.get("healed", "") == healed
    assert meta["prompt_tokens"] == len(ids)
    made = list(meta["token_ids"])
    expected = best_tokens(ids, healed.encode(), len(made))
    assert made == expected
    assert state.token_ids() == (*ids, *made)
    assert spelled(state.token_ids()) == state.text() == prompt + state["x"]
    num_taken = len(TOKENS.encode(prompt)) - len(ids)
    assert len(made) == 4 + num_taken or meta["finish_reason"] == "stop"


def test_the_small_model_goes_on_as_it_learned_to_where_it_is_healed(smollm2: Path) -> None:
    """A border within a word, and a space at the end, lead it astray."""

    @pm.function
    def program(s: pm.State, prompt: str) -> None:
        s += prompt + pm.gen("x", max_tokens=4, temperature=0)

    with AsyncEngine(smollm2, dtype="float32", num_pages=64) as model:
        for prompt, expected in (
            ("Visit our website at http:", "//"),
            ("The capital of France is ", "Paris"),
            ("import numpy as n", "p\n"),
        ):
            exact = program.run(prompt, backend=model)["x"]
            healed = program.run(prompt, backend=model, boundary="heal")["x"]
            assert healed.startswith(expected)
            assert not exact.startswith(expected)


def test_a_url_goes_on_with_the_token_that_reaches_over_the_colon(engine: AsyncEngine) -> None:
    """The model is made to like `://`, and after `:` alone to like something else."""
    wanted = TOKENS.encode("://")
    assert len(wanted) == 1
    request = Request(
        request_id="1",
        token_ids=tuple(TOKENS.encode("http")),
        healed=":",
        sampling=SamplingParams(temperature=0, max_tokens=1, logit_bias=((wanted[0], 50.0),)),
    )
    [event] = events_of(bpe_engine(), request)
    assert event.token_ids == tuple(wanted)
    assert event.text == "//"


def events_of(engine: Engine, *requests: Request) -> list[TokenEvent]:
    for request in requests:
        engine.submit(request)
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    invariants.check(engine._kv.cache)
    return [event for event in events if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("jump_forward", ["token", "canonical"])
@pytest.mark.parametrize(
    ("prompt", "options", "pattern"),
    [
        ("http:", {"regex": "//[a-c]{2,5}!"}, r"//[a-c]{2,5}!"),
        ("is th", {"regex": "(en|e)x?"}, r"(en|e)x?"),
        ("x = ", {"json_schema": {"enum": [12, "a"]}}, r'12|"a"'),
        ("x = ", {"ebnf": 'root ::= "(" root ")" | "1"'}, r"\(*1\)*"),
        ("a\n", {"structural_tag": {"type": "structural_tag", "format": {
            "type": "const_string", "value": "\nb"}}}, "\nb"),
    ],
)  # fmt: skip
def test_a_constraint_is_for_what_follows(
    engine: AsyncEngine, jump_forward: str, prompt: str, options: dict[str, Any], pattern: str
) -> None:
    for seed in range(5):
        state = go_on.run(
            prompt,
            **options,
            jump_forward=jump_forward,
            max_tokens=12,
            temperature=1,
            seed=seed,
            backend=engine,
        )
        assert state.meta("x")["healed"]
        assert re.fullmatch(pattern, state["x"])
        assert state.text() == prompt + state["x"]
        assert spelled(state.token_ids()) == state.text()
        if jump_forward == "canonical":
            healed = state.meta("x")["healed"]
            assert list(state.meta("x")["token_ids"]) == TOKENS.encode(healed + state["x"])


def test_a_constrained_text_is_complete_within_the_tokens_beside_those_taken_back(
    engine: AsyncEngine,
) -> None:
    for seed in range(20):
        state = go_on.run(
            "http:", regex="[a-z]*//", max_tokens=2, temperature=1, seed=seed, backend=engine
        )
        assert state["x"].endswith("//")
        assert state.meta("x")["completion_tokens"] <= 3


def test_the_healed_text_is_whole_however_few_tokens_there_are(engine: AsyncEngine) -> None:
    for seed in range(30):
        state = go_on.run("see http:", max_tokens=1, temperature=5, seed=seed, backend=engine)
        assert spelled(state.token_ids()) == state.text()
        assert state.text().startswith("see http:")


@pytest.mark.parametrize("prompt", ["http:", "so th", "a 🐈\n"])
def test_log_probabilities_are_those_of_the_model_without_the_mask(
    engine: AsyncEngine, prompt: str
) -> None:
    for options in ({}, {"regex": "[/a-z\n]{3}"}):
        state = go_on.run(
            prompt,
            **options,
            max_tokens=3,
            temperature=1,
            seed=1,
            top_logprobs_num=2,
            backend=engine,
        )
        meta = state.meta("x")
        ids, _ = taken_back(prompt)
        assert len(meta["logprobs"]) == len(meta["token_ids"])
        for index, entry in enumerate(meta["logprobs"]):
            known = next_logprobs((*ids, *meta["token_ids"][:index]))
            assert entry.token_id == meta["token_ids"][index]
            assert entry.logprob == pytest.approx(float(known[entry.token_id]), abs=1e-3)
            assert len(entry.top) == 2


@pytest.mark.parametrize("seed", range(6))
def test_stop_strings_are_sought_behind_the_healed_text(engine: AsyncEngine, seed: int) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1, "seed": seed, "backend": engine}
    for prompt in ("http:", "so th", "x\n"):
        plain = go_on.run(prompt, ignore_eos=True, **options)
        healed = plain.meta("x")["healed"]
        stop = plain["x"][:1]
        for stops in ([healed + stop], [stop], [healed]):
            state = go_on.run(prompt, stop=stops, ignore_eos=True, **options)
            expected = plain["x"].partition(stops[0])[0]
            assert state["x"] == expected
            assert state.text() == prompt + expected
            assert spelled(state.token_ids()) == state.text()


def test_a_stop_string_inside_the_first_token_leaves_the_healed_text(engine: AsyncEngine) -> None:
    [bias] = TOKENS.encode("://")
    for constraint in (None, Constraint.regex("//x")):
        for mode in ("token", "canonical"):
            request = Request(
                request_id="1",
                token_ids=tuple(TOKENS.encode("http")),
                healed=":",
                constraint=constraint,
                sampling=SamplingParams(
                    temperature=0,
                    max_tokens=3,
                    stop=("//",),
                    logit_bias=((bias, 60.0),),
                    jump_forward=mode,  # type: ignore[arg-type]
                ),
            )
            events = events_of(bpe_engine(), request)
            assert "".join(event.text for event in events) == ""
            ids = [token_id for event in events for token_id in event.token_ids]
            assert spelled(ids) == ":"
            assert events[-1].stop_reason == "//"


@pytest.mark.parametrize("seed", range(4))
def test_stop_tokens_end_the_text_wherever_they_are_drawn(engine: AsyncEngine, seed: int) -> None:
    for prompt in ("http:", "so th", "is ab"):
        for stop in (":", "://", " th", "h", "a", "b", "abc"):
            state = go_on.run(
                prompt,
                stop_token_ids=TOKENS.encode(stop),
                max_tokens=6,
                temperature=2,
                seed=seed,
                backend=engine,
            )
            assert state.text() == prompt + state["x"]
            assert spelled(state.token_ids()) == state.text()


def test_a_stream_has_only_what_follows(engine: AsyncEngine) -> None:
    for seed in range(8):
        state = go_on.run(
            "so th", max_tokens=6, temperature=1, seed=seed, stream=True, backend=engine
        )
        chunks = list(state.text_iter())
        assert chunks[0] == "so th"
        assert "".join(chunks[1:]) == "".join(state.text_iter("x")) == state["x"]


def test_the_ids_are_the_same_cold_warm_and_in_a_batch() -> None:
    prompts = ["http:", "so th", "so the", "x\n", "see http:"]
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1, "seed": 3}
    with async_engine() as engine:
        alone = []
        for prompt in prompts:
            engine.flush_cache()
            alone.append(go_on.run(prompt, backend=engine, **options).token_ids())
        warm = [go_on.run(p, backend=engine, **options).token_ids() for p in prompts]
        engine.flush_cache()
        batch = go_on.run_batch([{"prompt": p} for p in prompts], backend=engine, **options)
    with async_engine(num_pages=12, max_batch_tokens=4) as small:
        tight = go_on.run_batch([{"prompt": p} for p in prompts], backend=small, **options)
    assert alone == warm
    assert alone == [state.token_ids() for state in batch]
    assert alone == [state.token_ids() for state in tight]


def test_branches_share_what_is_before_the_healed_text_and_each_token_is_computed_once() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "see http:"
        branches = s.fork(3)
        branches += lambda i: pm.gen("x", max_tokens=3, boundary="heal") + f" th{i} a"
        branches += pm.gen("y", max_tokens=3, boundary="heal")
        branches.join(mode="concate_and_append")
        s += pm.gen("z", max_tokens=2, boundary="heal")

    with async_engine() as engine:
        backend = Recording(engine)
        before = engine.stats()
        state = program.run(backend=backend, temperature=1, seed=1, ignore_eos=True)
        did = engine.stats().since(before)
        assert did.computed_tokens == backend.num_tokens_to_compute()
        assert spelled(state.token_ids()) == state.text()
        first = [request for request in backend.asked if request.path][:3]
        assert {request.token_ids for request in first} == {tuple(TOKENS.encode("see http"))}


def test_another_grammar_backend_does_not_heal(engine: AsyncEngine) -> None:
    with pytest.raises(pm.PrimitiveFailed) as raised:
        go_on.run("http:", regex="//", grammar_backend="outlines-core", backend=engine)
    assert isinstance(raised.value.__cause__, UnsupportedConstraint)
    assert "boundary='heal'" in str(raised.value)
