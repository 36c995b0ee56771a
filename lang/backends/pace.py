"""How fast requests go to an API: so many requests and tokens a minute, and pauses it asks for."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from palmette.errors import InvalidRequest

_MINUTE = 60.0


@dataclass(slots=True, eq=False)
class _Waiter:
    num_tokens: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class _Bucket:
    """Fills evenly up to what a minute allows; what was taken too much is waited for."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._size = self._level = per_minute
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until so much is there; of more than a whole minute's, until it is full."""
        self._level = min(self._size, self._level + self._size * (now - self._filled_at) / _MINUTE)
        self._filled_at = now
        missing = min(amount, self._size) - self._level
        # A hair is lost in adding up, and a timer may ring a hair early.
        return missing * _MINUTE / self._size if missing > 1e-6 * self._size else 0.0

    def take(self, amount: float) -> None:
        """Below nothing, if need be; a negative amount is given back."""
        self._level = min(self._size, self._level - amount)


class Pace:
    """Lets requests through in the order in which they ask, whatever event loops they are on.

    Of each limit a minute's worth is there at first, and comes back evenly. Nothing is polled: the
    request whose turn it is sleeps until its time, the others until they are told. One that is
    cancelled while it waits leaves its place. Raises InvalidRequest for a limit that is not above
    0.
    """

    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        limits = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        for name, limit in limits.items():
            is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
            if limit is not None and not (is_number and 0 < limit < math.inf):
                raise InvalidRequest(f"{name} must be a number above 0, got {limit!r}", param=name)
        self._clock = clock
        self._requests, self._tokens = (
            None if limit is None else _Bucket(limit, now) for limit in limits.values()
        )
        self._resumes_at = now
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()

    async def wait(self, num_tokens: int) -> None:
        """Until a request of about so many tokens, prompt and completion, may be sent."""
        waiter = _Waiter(num_tokens)
        with self._lock:
            self._waiters.append(waiter)
        try:
            while (delay := self._seconds_for(waiter)) != 0:
                await _news_within(waiter, delay)
        except BaseException:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                self._wake_first()
            raise

    def settle(self, num_reserved: int, num_used: int) -> None:
        """A request that was let through for `num_reserved` tokens has used `num_used`."""
        if self._tokens is not None:
            with self._lock:
                self._tokens.take(num_used - num_reserved)
                self._wake_first()

    def pause(self, seconds: float) -> None:
        """Let nothing through for so long."""
        with self._lock:
            self._resumes_at = max(self._resumes_at, self._clock() + seconds)

    def _seconds_for(self, waiter: _Waiter) -> float:
        """Let it through, which gives 0; or how long until it may be, if it is the first."""
        with self._lock:
            waiter.news.clear()
            while self._waiters[0].loop.is_closed():  # what waited there will never go
                self._waiters.popleft()
            if self._waiters[0] is not waiter:
                return math.inf
            now = self._clock()
            wanted = ((self._requests, 1), (self._tokens, waiter.num_tokens))
            buckets = [(bucket, amount) for bucket, amount in wanted if bucket is not None]
            delays = [bucket.seconds_until(amount, now) for bucket, amount in buckets]
            delay = max(0.0, self._resumes_at - now, *delays)
            if delay == 0:
                for bucket, amount in buckets:
                    bucket.take(amount)
                self._waiters.popleft()
                self._wake_first()
            return delay

    def _wake_first(self) -> None:
        """With the lock held."""
        while self._waiters:
            first = self._waiters[0]
            try:
                first.loop.call_soon_threadsafe(first.news.set)
                return
            except RuntimeError:  # its event loop is closed
                self._waiters.popleft()


async def _news_within(waiter: _Waiter, seconds: float) -> None:
    timer = None
    if seconds < math.inf:
        timer = asyncio.get_running_loop().call_later(seconds, waiter.news.set)
    try:
        await waiter.news.wait()
    finally:
        if timer is not None:
            timer.cancel()


def retry_after(
    headers: Mapping[str, str], *, now: Callable[[], float] = time.time
) -> float | None:
    """The seconds that a server asks to wait, in either form of ``Retry-After``; None if it does
    not, or in no form that is known.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None or len(value) > 64:
            continue
        try:
            seconds = float(value) / unit
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - now()
            except (ValueError, OverflowError):
                continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    return None
