"""How fast requests go to an API, by a clock that jumps to when something is due."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import InvalidRequest
from palmette.lang.backends.pace import Pace, retry_after


class Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits for nothing; time passes all the same."""

    now = 0.0
    num_waits = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.now += timeout
            self.num_waits += 1
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = Jumping()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def times_of(
    loop: Loop, pace: Pace, sizes: list[int], use: Callable[[int], Awaitable[None]] | None = None
) -> list[float]:
    """When each of these requests, asked for at once and in this order, goes."""
    went: list[float] = [0.0] * len(sizes)

    async def ask(index: int, size: int) -> None:
        await pace.wait(size)
        went[index] = loop.time()
        if use is not None:
            await use(size)

    async def all_of_them() -> None:
        await asyncio.gather(*(ask(index, size) for index, size in enumerate(sizes)))

    loop.run_until_complete(all_of_them())
    return went


def test_a_minutes_worth_goes_at_once_and_the_rest_evenly(loop: Loop) -> None:
    pace = Pace(requests_per_minute=3, clock=loop.time)
    assert times_of(loop, pace, [1] * 6) == pytest.approx([0, 0, 0, 20, 40, 60])


def test_tokens_are_waited_for_and_no_small_request_overtakes_a_large_one(loop: Loop) -> None:
    pace = Pace(tokens_per_minute=600, clock=loop.time)
    assert times_of(loop, pace, [600, 300, 1]) == pytest.approx([0, 30, 30.1])


def test_what_is_larger_than_a_minute_goes_when_all_is_there_and_is_paid_for(loop: Loop) -> None:
    pace = Pace(tokens_per_minute=60, clock=loop.time)
    assert times_of(loop, pace, [120, 1]) == pytest.approx([0, 61])


def test_nobody_is_woken_in_between(loop: Loop) -> None:
    times_of(loop, Pace(requests_per_minute=1, clock=loop.time), [1] * 50)
    assert loop.selector.num_waits < 55


def test_tokens_given_back_let_the_next_one_go_before_its_time(loop: Loop) -> None:
    pace = Pace(tokens_per_minute=100, clock=loop.time)

    async def use(size: int) -> None:
        await asyncio.sleep(3)
        pace.settle(size, 10)

    assert times_of(loop, pace, [100, 80], use) == pytest.approx([0, 3])


def test_what_was_used_beyond_the_estimate_is_waited_for(loop: Loop) -> None:
    pace = Pace(tokens_per_minute=60, clock=loop.time)

    async def use(size: int) -> None:
        pace.settle(size, 70)

    assert times_of(loop, pace, [60, 1], use) == pytest.approx([0, 11])


def test_a_pause_holds_up_those_that_wait_already(loop: Loop) -> None:
    pace = Pace(requests_per_minute=60, clock=loop.time)

    async def use(_: int) -> None:
        pace.pause(7)

    assert times_of(loop, pace, [1]) == [0]
    assert times_of(loop, pace, [1], use) == [0]
    assert times_of(loop, pace, [1, 1]) == pytest.approx([7, 7])


def test_one_that_is_cancelled_leaves_its_place_to_the_next(loop: Loop) -> None:
    pace = Pace(requests_per_minute=1, clock=loop.time)

    async def cancelling() -> float:
        await pace.wait(1)
        first, second = (asyncio.ensure_future(pace.wait(1)) for _ in range(2))
        await asyncio.sleep(59)
        first.cancel()
        await second
        assert first.cancelled()
        return loop.time()

    assert loop.run_until_complete(cancelling()) == pytest.approx(60)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 40)), min_size=1, max_size=25),
    st.integers(1, 20),
    st.integers(50, 400),
)
def test_in_no_stretch_of_time_goes_more_than_the_limits_allow(
    requests: list[tuple[int, float]], per_minute: int, tokens: int
) -> None:
    loop = Loop()
    pace = Pace(requests_per_minute=per_minute, tokens_per_minute=tokens, clock=loop.time)
    went: list[tuple[float, int]] = []

    async def ask(size: int) -> None:
        await pace.wait(size)
        went.append((loop.time(), size))

    async def all_of_them() -> None:
        tasks = []
        for size, later in requests:
            await asyncio.sleep(later)
            tasks.append(asyncio.ensure_future(ask(size)))
        await asyncio.gather(*tasks)

    loop.run_until_complete(all_of_them())
    loop.close()
    assert [size for _, size in went] == [size for size, _ in requests]  # first come, first served
    for start, (began, _) in enumerate(went):
        for end, (now, _) in enumerate(went[start:], start):
            minutes = 1 + (now - began) / 60
            assert end - start + 1 <= per_minute * minutes + 1e-3
            # The last one may be larger than what was there.
            assert sum(s for _, s in went[start:end]) <= tokens * minutes + 300 + 1e-3


def test_requests_of_several_event_loops_take_turns() -> None:
    pace = Pace(requests_per_minute=60_000)
    went: list[int] = []

    def work() -> None:
        async def ask(number: int) -> None:
            await pace.wait(1)
            went.append(number)

        async def all_of_them() -> None:
            await asyncio.gather(*map(ask, range(300)))

        asyncio.run(all_of_them())

    pace.pause(0.05)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(went) == 900


def test_a_loop_that_is_gone_holds_up_nobody() -> None:
    pace = Pace(requests_per_minute=60_000)
    pace.pause(0.05)
    gone = asyncio.new_event_loop()
    waiting = pace.wait(1)
    task = gone.create_task(waiting)
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    asyncio.run(asyncio.wait_for(pace.wait(1), 5))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.close()


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), True, "3"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokens_per_minute must be a number above 0"):
        Pace(tokens_per_minute=limit)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "3"}, 0.25),
        ({"retry-after": "-4"}, 0),
        ({"retry-after": "Thu, 01 Jan 1970 00:02:00 GMT"}, 20),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "9" * 5000}, None),
    ],
)
def test_what_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=lambda: 100.0) == seconds
