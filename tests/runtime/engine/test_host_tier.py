"""Pages that are evicted and come back, in whole engines."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import InvalidRequest
from palmette.protocol import Request, SamplingParams, TokenEvent, Usage
from palmette.radix_cache.invariants import check
from palmette.runtime.engine import Engine
from palmette.runtime.kv.host import HostPool
from palmette.runtime.testing import history_engine, tiny_engine

HISTORY_PAGE = 4 * 8  # bytes of a page of 4 tokens of a history engine
TINY_PAGE = 4 * 256


def logits_of(history: tuple[int, ...]) -> dict[int, float]:
    """The next token depends on all before it."""
    total = sum((place + 1) * token_id for place, token_id in enumerate(history))
    return {total % 251: 20.0}


def make(num_pages: int, num_slots: int, **options: Any) -> Engine:
    return history_engine(
        logits_of,
        page_size=4,
        num_pages=num_pages,
        host_memory=num_slots * HISTORY_PAGE,
        **options,
    )[0]


class Answers:
    """What engines answer, by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.token_ids: dict[str, list[int]] = {}
        self.usage: dict[str, Usage] = {}

    def submit(
        self, name: str, token_ids: Sequence[int], num_tokens: int = 2, salt: str = ""
    ) -> None:
        self.token_ids[name] = []
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.submit(
            Request(request_id=name, token_ids=tuple(token_ids), sampling=sampling, salt=salt)
        )

    def step(self) -> None:
        for event in self.engine.step():
            assert isinstance(event, TokenEvent)
            assert event.error is None
            self.token_ids[event.request_id] += event.token_ids
            if event.usage is not None:
                self.usage[event.request_id] = event.usage

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def ask(self, name: str, token_ids: Sequence[int], *, salt: str = "") -> Usage:
        self.submit(name, token_ids, salt=salt)
        self.run()
        return self.usage[name]


def prompt(number: int, length: int = 22) -> list[int]:
    return [(number * 37 + place * 5) % 251 for place in range(length)]


def test_prefixes_that_were_evicted_are_not_computed_again(tmp_path: Path) -> None:
    answers = []
    computed = []
    for options in ({}, {"num_slots": 64}, {"num_slots": 64, "host_directory": tmp_path}):
        engine = make(num_pages=16, **{"num_slots": 0, **options})
        asked = Answers(engine)
        for number in range(12):
            asked.ask(str(number), prompt(number % 6))
        answers.append(asked.token_ids)
        computed.append(engine.stats().computed_tokens)
        stats = engine.stats()
        assert stats.host_tier_size == options.get("num_slots", 0)
        assert (stats.host_tier_pages > 0) == (stats.restored_pages > 0) == bool(options)
    assert answers[0] == answers[1] == answers[2]
    # 22 tokens and the first of two that are produced, or of these what is behind five pages.
    assert computed == [12 * 23, 6 * 23 + 6 * 3, 6 * 23 + 6 * 3]


def test_what_comes_back_counts_as_cached() -> None:
    engine = make(num_pages=8, num_slots=32)
    asked = Answers(engine)
    asked.ask("a", prompt(1))
    asked.ask("filler", prompt(2, 30))
    usage = asked.ask("b", prompt(1))
    assert (usage.cached_tokens, usage.prefilled_tokens) == (20, 2)
    assert engine.stats().restored_pages == 5
    assert asked.token_ids["a"] == asked.token_ids["b"]


def test_keys_and_values_come_back_bit_by_bit() -> None:
    engine = tiny_engine(page_size=4, num_pages=16, host_memory=64 * TINY_PAGE)
    before = engine.copy_prefix(prompt(1, 41)).keys_and_values
    engine.copy_prefix(prompt(2, 61))
    computed = engine.stats().computed_tokens
    after = engine.copy_prefix(prompt(1, 41)).keys_and_values
    assert engine.stats().computed_tokens - computed == 1
    assert engine.stats().restored_pages == 10
    assert torch.equal(before[:, :, :, :40], after[:, :, :, :40])
    fresh = tiny_engine(page_size=4, num_pages=16).copy_prefix(prompt(1, 41)).keys_and_values
    assert torch.equal(fresh, after)


def test_nobody_gets_what_was_evicted_under_another_salt() -> None:
    engine = make(num_pages=8, num_slots=32)
    asked = Answers(engine)
    asked.ask("a", prompt(1), salt="one")
    asked.ask("filler", prompt(2, 30))
    assert asked.ask("b", prompt(1), salt="two").cached_tokens == 0
    asked.ask("filler again", prompt(3, 30))
    assert asked.ask("c", prompt(1), salt="one").cached_tokens == 20


def test_a_flush_leaves_nothing_to_come_back() -> None:
    engine = make(num_pages=8, num_slots=32)
    asked = Answers(engine)
    asked.ask("a", prompt(1))
    asked.ask("filler", prompt(2, 30))
    engine.flush_cache()
    assert engine.stats().host_tier_pages == 0
    assert asked.ask("b", prompt(1)).cached_tokens == 0


def test_tokens_that_can_come_back_are_explained_as_such() -> None:
    engine = make(num_pages=8, num_slots=32)
    asked = Answers(engine)
    asked.ask("a", prompt(1))
    asked.ask("filler", prompt(2, 30))
    told = str(engine.explain([*prompt(1), asked.token_ids["a"][0]]))
    assert "tokens 0 to 19: in the tier" in told
    assert "tokens 20 to 22: evicted" in told


def test_preempted_sequences_come_back_from_the_tier_with_the_same_ids() -> None:
    outcomes = []
    for num_pages, num_slots in ((64, 0), (10, 0), (10, 32)):
        engine = make(num_pages, num_slots)
        asked = Answers(engine)
        for number in range(3):
            asked.submit(str(number), prompt(number, 9), num_tokens=20)
        asked.run()
        outcomes.append((asked.token_ids, engine.stats()))
    (roomy, _), (tight, without), (tiered, with_tier) = outcomes
    assert roomy == tight == tiered
    assert without.preemptions > 0
    assert with_tier.preemptions > 0
    assert with_tier.restored_pages > 0
    assert with_tier.recomputed_tokens < without.recomputed_tokens


def test_a_page_is_copied_before_it_becomes_somebody_elses() -> None:
    """`a` copies the page of `p`, which `c` evicts; `d` copies what `a` has just copied."""
    histories = set()

    def noted(history: tuple[int, ...]) -> dict[int, float]:
        histories.add(history)
        return {9: 20.0}

    engine, _ = history_engine(noted, page_size=4, num_pages=4, policy="fcfs")
    asked = Answers(engine)
    prompts = {
        "p": [1, 1, 1],
        "z": [8, 8, 8],
        "a": [1, 1, 1, 7],
        "b": [8, 8, 8, 5],
        "c": [4, 4, 4, 4],
        "d": [1, 1, 1, 9],
    }
    for name, token_ids in prompts.items():
        asked.submit(name, token_ids, num_tokens=1)
        if name in "pz":
            asked.run()
    asked.run()
    assert histories == set(map(tuple, prompts.values()))


def test_pages_that_cannot_be_copied_out_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: HostPool, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(HostPool, "store", fail)
    asked = Answers(make(num_pages=8, num_slots=32))
    asked.ask("a", prompt(1))
    asked.ask("filler", prompt(2, 30))
    assert asked.ask("b", prompt(1)).cached_tokens == 0
    assert asked.token_ids["a"] == asked.token_ids["b"]
    assert "the tier takes no more" in caplog.text


def test_a_request_whose_pages_cannot_be_copied_back_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(num_pages=8, num_slots=32)
    asked = Answers(engine)
    asked.ask("a", prompt(1))
    asked.ask("filler", prompt(2, 30))

    def fail(self: HostPool, slot: int, page_id: int) -> None:
        raise RuntimeError("no such memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostPool, "restore", fail)
        asked.submit("b", prompt(1))
        (event,) = engine.step()
    assert "the step failed: no such memory" in str(event.error)
    check(engine._kv.cache, owned=[])
    assert asked.ask("c", prompt(1)).cached_tokens == 20
    assert asked.token_ids["a"] == asked.token_ids["c"]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(8, 20),
    num_slots=st.integers(1, 24),
    page_size=st.sampled_from([1, 2, 4]),
    max_batch_tokens=st.integers(4, 40),
    policy=st.sampled_from(["program", "lpm", "fcfs"]),
)
def test_a_tiny_pool_with_a_tiny_tier_answers_as_a_huge_one(
    seed: int,
    num_pages: int,
    num_slots: int,
    page_size: int,
    max_batch_tokens: int,
    policy: str,
) -> None:
    rng = random.Random(seed)
    longest = num_pages * page_size - 7
    small, large = (
        Answers(
            history_engine(
                logits_of,
                page_size=page_size,
                num_pages=pages,
                host_memory=slots * page_size * 8,
                max_batch_tokens=max_batch_tokens,
                policy=policy,  # type: ignore[arg-type]
            )[0]
        )
        for pages, slots in ((num_pages, num_slots), (1000, 0))
    )
    aborted: set[str] = set()
    trunks = [[rng.randrange(250) for _ in range(longest)] for _ in range(3)]
    for index in range(25):
        trunk = rng.choice(trunks)
        length = rng.randint(1, longest)
        token_ids = [*trunk[: max(0, length - 3)], *(rng.randrange(3) for _ in range(3))][:longest]
        num_tokens, salt = rng.randint(0, 6), rng.choice(["", "", "s"])
        for asked in (small, large):
            asked.submit(str(index), token_ids, num_tokens, salt)
        for _ in range(rng.choice([0, 1, 3, 20])):
            small.step()
        if rng.random() < 0.05:
            small.engine.flush_cache()
        if rng.random() < 0.1:
            aborted.add(str(index))
            small.engine.abort(str(index))
    small.run()
    large.run()
    for name, token_ids in large.token_ids.items():
        told = small.token_ids[name]
        assert told == (token_ids[: len(told)] if name in aborted else token_ids)
    check(small.engine._kv.cache, owned=[])
    tier = small.engine._kv.cache.tier
    assert tier is not None
    assert tier.promised_slots() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory": -1}, "host_memory must be an integer of at least 0, got -1"),
        ({"host_memory": None}, "host_memory must be an integer"),
        ({"host_memory": 1.5}, "host_memory must be an integer of at least 0, got 1.5"),
        ({"host_memory": 5}, "host_memory of 5 bytes holds no page of 4 tokens"),
        ({"host_memory": 1 << 20, "prefix_cache": False}, "host_memory with prefix_cache=False"),
        ({"host_directory": "/"}, "host_directory without host_memory"),
        ({"host_directory": ""}, "host_directory must be the name of a directory"),
        ({"host_directory": "/nowhere", "host_memory": 1 << 10}, "No such file or directory"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        history_engine(logits_of, page_size=4, num_pages=8, **options)
    assert refused.value.param == next(iter(options))


def interrupts_once(act: Callable[..., Any], num_calls: int) -> Callable[..., Any]:
    """The same function, whose call number `num_calls` is interrupted before it does anything."""
    calls = itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == num_calls:
            raise KeyboardInterrupt
        return act(*args)

    return interrupted


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("_tier", "_store"),
        ("_worker.host", "restore"),
        ("_worker.kv", "copy_page"),
        ("_worker.model", "forward"),
    ],
)
@pytest.mark.parametrize("num_calls", range(4))
def test_an_interrupt_costs_what_ran_and_no_wrong_token_comes_of_it(
    part: str, name: str, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C in a session that goes on: what was not copied or computed is not read later."""
    expected = Answers(make(16, 16))
    for number in range(3):
        expected.ask(str(number), prompt(number))
    engine = make(num_pages=8, num_slots=16)
    asked = Answers(engine)
    for number in (0, 1, 0, 2):
        asked.ask(f"before {number}", prompt(number))
    owner = attrgetter(part)(engine)
    monkeypatch.setattr(owner, name, interrupts_once(getattr(owner, name), num_calls))
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for index, number in enumerate((0, 1, 0)):
        token_ids = (*prompt(number)[:18], number)
        request = Request(request_id=f"during {index}", token_ids=token_ids, sampling=sampling)
        engine.submit(request)
    events = []
    num_interrupts = 0
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    errors = [event.error for event in events if event.error is not None]
    monkeypatch.undo()
    assert num_interrupts == 1 or (num_calls and not errors)
    assert all("the step was interrupted" in str(error) for error in errors), errors
    assert sum(event.finish_reason is not None for event in events) == 3
    for number in (0, 1, 2, 0):
        asked.ask(f"after {number}", prompt(number))
        assert asked.token_ids[f"after {number}"] == expected.token_ids[str(number)]
    check(engine._kv.cache)
