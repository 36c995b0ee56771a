"""What the requests to an API have come to: counts, tokens and, where prices are given, cost."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from palmette.errors import InvalidRequest
from palmette.protocol import Usage

_PER = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a million tokens cost, in a currency of the caller's: of prompts, of those the server
    had `cached` (as the others, if it is None), and of completions.

    Raises InvalidRequest for a price that is no number of at least 0.
    """

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            price = getattr(self, each.name)
            is_number = isinstance(price, int | float) and not isinstance(price, bool)
            is_price = is_number and 0 <= price < math.inf
            if not is_price and not (price is None and each.name == "cached"):
                raise InvalidRequest(
                    f"the price of {each.name} tokens must be a number of at least 0, got "
                    f"{price!r}",
                    param="prices",
                )

    @classmethod
    def of(cls, prices: Prices | Mapping[str, float] | None) -> Prices | None:
        """Prices, given as such or as a dict."""
        if prices is None or isinstance(prices, Prices):
            return prices
        known = {each.name for each in fields(cls)}
        if not {"prompt", "completion"} <= set(prices) <= known:
            raise InvalidRequest(
                "prices are those of prompt and completion tokens, and of cached ones if they "
                f"differ; got {', '.join(map(str, prices)) or 'none'}",
                param="prices",
            )
        return cls(**prices)

    def priced(self, usage: Usage) -> Usage:
        """The same usage with what it costs."""
        cached = self.prompt if self.cached is None else self.cached
        cost = (
            usage.prefilled_tokens * self.prompt
            + usage.cached_tokens * cached
            + usage.completion_tokens * self.completion
        )
        return replace(usage, cost=cost / _PER)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStats:
    """What a backend has asked of its API so far.

    Tokens are as the server counts them, of answers that came to their end: what it makes of a
    request that is ended early, and whether that costs, it does not say. `cost` is None without
    prices. `waited_seconds` were spent waiting to be sent, of all requests together.
    """

    num_tries: int = 0  # requests sent, those sent again included
    num_answered: int = 0
    num_failed: int = 0
    num_running: int = 0  # those that wait included
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    waited_seconds: float = 0.0


class Accounts:
    """Adds up, from whatever event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = RemoteStats()

    @property
    def stats(self) -> RemoteStats:
        return self._stats

    def begin(self) -> None:
        """A request came in."""
        self._add(num_running=1)

    def sent(self, waited_seconds: float) -> None:
        """It was sent, once more or for the first time, after so long."""
        self._add(num_tries=1, waited_seconds=waited_seconds)

    def answered(self, usage: Usage) -> None:
        """Its answer is complete."""
        self._add(
            num_answered=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost=usage.cost,
        )

    def failed(self) -> None:
        """It came to nothing."""
        self._add(num_failed=1)

    def end(self) -> None:
        """It is over."""
        self._add(num_running=-1)

    def _add(self, **more: float | None) -> None:
        with self._lock:
            added = {
                name: (getattr(self._stats, name) or 0) + value
                for name, value in more.items()
                if value is not None
            }
            self._stats = replace(self._stats, **added)  # type: ignore[arg-type]
