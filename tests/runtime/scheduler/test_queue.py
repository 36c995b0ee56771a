"""Which waiting sequence is tried next, under each policy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import InvalidRequest
from palmette.radix_cache import Namespace, RadixCache
from palmette.runtime.config import SchedulerSection
from palmette.runtime.scheduler.programs import Program
from palmette.runtime.scheduler.queue import (
    DepthFirst,
    FirstComeFirstServed,
    LongestPrefixMatch,
    WaitingQueue,
    make_queue,
)
from palmette.runtime.sequence import Handle, Sequence

NOTHING_CACHED: Callable[[Sequence], int] = lambda sequence: 0  # noqa: E731


def waiting(text: str, *, at: float = 0.0, salt: str = "") -> Sequence:
    return Sequence(
        request_id=text,
        namespace=Namespace(salt=salt),
        token_ids=[ord(c) for c in text],
        num_prompt_tokens=len(text),
        submitted_at=at,
        max_length=1000,
    )


def admit_all(queue: WaitingQueue, now: float = 0.0) -> list[str]:
    """Everything admitted in one round, in order."""
    order = []
    walk = queue.round(now)
    while (sequence := walk.next()) is not None:
        walk.admitted()
        order.append(sequence.request_id)
    return order


def test_fcfs_goes_by_arrival() -> None:
    queue = FirstComeFirstServed(max_tried=10)
    for text in ["b", "a", "c"]:
        queue.add(waiting(text))
    assert admit_all(queue) == ["b", "a", "c"]
    assert len(queue) == 0


def test_depth_first_uses_up_a_subtree_before_it_goes_on() -> None:
    queue = DepthFirst(NOTHING_CACHED, max_wait=100)
    for text in ["sys/a/1", "few/x", "sys/b/1", "sys/a/2", "few/y", "sys/b/2", "sys/a/3"]:
        queue.add(waiting(text))
    order = admit_all(queue)
    assert order[:3] == ["sys/a/1", "sys/a/2", "sys/a/3"]
    assert order[3:5] == ["sys/b/1", "sys/b/2"]
    assert sorted(order[5:]) == ["few/x", "few/y"]


def test_a_newcomer_with_more_in_the_cache_comes_first() -> None:
    cached = {"hot/1": 4}
    queue = DepthFirst(lambda s: cached.get(s.request_id, 0), max_wait=100)
    for text in ["aa/1", "aa/2", "hot/1", "aa/3"]:
        queue.add(waiting(text))
    assert admit_all(queue)[0] == "hot/1"


def test_a_newcomer_whose_prefix_was_evicted_meanwhile_stands_in_line() -> None:
    cached = {"hot/1": 4}
    queue = DepthFirst(lambda s: cached.get(s.request_id, 0), max_wait=100)
    for text in ["aa/1", "hot/1"]:
        queue.add(waiting(text))
    cached.clear()
    assert admit_all(queue) == ["aa/1", "hot/1"]


@pytest.mark.parametrize("policy", ["program", "lpm"])
def test_whoever_has_waited_too_long_comes_first(policy: str) -> None:
    cached = {"hot/1": 4, "hot/2": 4}
    config = SchedulerSection(policy=policy, max_wait=5)  # type: ignore[arg-type]
    queue = make_queue(config, lambda s: cached.get(s.request_id, 0))
    queue.add(waiting("cold", at=0.0))
    queue.add(waiting("hot/1", at=1.0))
    queue.add(waiting("hot/2", at=6.0))
    assert admit_all(queue, now=7.0) == ["cold", "hot/1", "hot/2"]


def test_longest_prefix_match_takes_the_most_cached_first() -> None:
    cached = {"a": 1, "b": 3, "c": 2}
    queue = LongestPrefixMatch(lambda s: cached[s.request_id], max_wait=100)
    for text in cached:
        queue.add(waiting(text))
    assert admit_all(queue) == ["b", "c", "a"]


@pytest.mark.parametrize("policy", ["program", "lpm", "fcfs"])
def test_a_preempted_sequence_comes_before_all_that_never_ran(policy: str) -> None:
    queue = make_queue(SchedulerSection(policy=policy), NOTHING_CACHED)  # type: ignore[arg-type]
    queue.add(waiting("new"))
    queue.resume(waiting("second"))
    queue.resume(waiting("first"))
    assert [s.request_id for s in queue] == ["first", "second", "new"]
    assert admit_all(queue) == ["first", "second", "new"]


def test_all_that_wait_for_the_same_leader_are_passed_over_at_once() -> None:
    queue = DepthFirst(NOTHING_CACHED, max_wait=100)
    for text in [*(f"trunk/{i:03}" for i in range(200)), "other"]:
        queue.add(waiting(text))
    walk = queue.round(0.0)
    first = walk.next()
    assert first is not None
    walk.admitted()
    second = walk.next()
    assert second is not None
    walk.deferred(len("trunk/"))
    third = walk.next()
    assert third is not None
    assert third.request_id == "other"
    walk.admitted()
    assert walk.next() is None
    assert len(queue) == 199


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="policy must be"):
        SchedulerSection(policy="random")  # type: ignore[arg-type]


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["program", "lpm", "fcfs"]))
def test_every_sequence_is_admitted_exactly_once_whatever_is_deferred_and_ended(
    seed: int, policy: str
) -> None:
    rng = random.Random(seed)
    config = SchedulerSection(policy=policy, max_wait=3)  # type: ignore[arg-type]
    queue = make_queue(config, lambda s: rng.randrange(len(s.token_ids)))
    left: dict[int, Sequence] = {}
    now = 0.0
    for _ in range(60):
        now += rng.random()
        for _ in range(rng.randrange(4)):
            text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))
            sequence = waiting(text, at=now, salt=rng.choice(["", "x"]))
            left[id(sequence)] = sequence
            (queue.resume if rng.random() < 0.1 else queue.add)(sequence)
        if left and rng.random() < 0.2:
            queue.remove(left.pop(rng.choice(list(left))))
        walk = queue.round(now)
        tried: set[int] = set()
        for _ in range(rng.randrange(5)):
            candidate = walk.next()
            if candidate is None:
                break
            assert id(candidate) in left
            assert id(candidate) not in tried
            tried.add(id(candidate))
            if rng.random() < 0.4:
                walk.deferred(rng.randrange(1, len(candidate.token_ids) + 1))
            else:
                walk.admitted()
                del left[id(candidate)]
        assert len(queue) == len(left)
    while left:
        walk = queue.round(now)
        candidate = walk.next()
        assert candidate is not None
        walk.admitted()
        del left[id(candidate)]
    assert list(queue) == []


def prefilled(order: list[str]) -> int:
    """Tokens computed if the cache holds only the request before: cost of an order."""
    total, before = 0, ""
    for text in order:
        shared = next(
            (i for i, (a, b) in enumerate(zip(text, before, strict=False)) if a != b),
            min(len(text), len(before)),
        )
        total += len(text) - shared
        before = text
    return total


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.text("ab", min_size=6, max_size=6), min_size=1, max_size=40, unique=True),
)
def test_depth_first_order_computes_each_edge_of_the_tree_once(texts: list[str]) -> None:
    """Theorem 3.1 of the SGLang paper, with a cache that holds one request."""
    queue = DepthFirst(NOTHING_CACHED, max_wait=100)
    for text in texts:
        queue.add(waiting(text))
    edges = {text[: n + 1] for text in texts for n in range(6)}
    assert prefilled(admit_all(queue)) == len(edges)


def of_program(text: str, program: Program, *, goes_on: bool = False) -> Sequence:
    sequence = waiting(text)
    sequence.program = program
    if goes_on:
        lease = RadixCache(num_pages=1).match_and_lease([])
        sequence.handle = Handle(sequence.namespace, [], lease)
    return sequence


def begun(serial: int) -> Program:
    program = Program(f"p{serial}")
    program.serial = serial
    return program


def test_requests_that_go_on_come_before_newcomers_the_oldest_program_first() -> None:
    queue = DepthFirst(NOTHING_CACHED, max_wait=100)
    first, second = begun(1), begun(2)
    queue.add(waiting("new"))
    queue.add(of_program("second goes on", second, goes_on=True))
    queue.add(of_program("second's new branch", second))
    queue.add(of_program("first goes on", first, goes_on=True))
    assert len(queue) == 4
    assert admit_all(queue)[:2] == ["first goes on", "second goes on"]
    assert len(queue) == 0


def test_where_one_finds_no_room_only_programs_under_way_go_on_and_the_nearest_branch_first() -> (
    None
):
    queue = DepthFirst(NOTHING_CACHED, max_wait=100)
    program = begun(1)
    queue.add(of_program("aaaa 1", program))
    assert admit_all(queue) == ["aaaa 1"]
    queue.resume(waiting("was preempted"))
    queue.add(waiting("aaaa of no program"))
    for text in ("bbbb 1", "aaaa 2", "bbbb 2", "aaaa 3"):
        queue.add(of_program(text, program))
    queue.add(of_program("goes on", program, goes_on=True))
    walk = queue.round(0.0)
    first = walk.next()
    assert first is not None
    assert first.request_id == "was preempted"
    walk.passed()
    order = []
    while (sequence := walk.next()) is not None:
        walk.admitted()
        order.append(sequence.request_id)
    assert order[0] == "goes on"
    assert sorted(order[1:3]) == ["aaaa 2", "aaaa 3"]
    assert sorted(order[3:]) == ["bbbb 1", "bbbb 2"]


def test_an_overdue_one_is_passed_by_its_likes_only_if_they_came_soon_after_it() -> None:
    queue = DepthFirst(NOTHING_CACHED, max_wait=10)
    queue.add(waiting("aaaa 0"))
    assert admit_all(queue) == ["aaaa 0"]
    for text, at in (("bbbb 1", 0.0), ("aaaa 1", 4.9), ("aaaa 2", 5.1)):
        queue.add(waiting(text, at=at))
    assert admit_all(queue, now=20.0) == ["aaaa 1", "bbbb 1", "aaaa 2"]
