"""What left the tree lately, and why a prompt was not cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from palmette.radix_cache.names import Name
from palmette.radix_cache.node import Namespace, Node
from palmette.radix_cache.tree import Removal


@dataclass(frozen=True, slots=True)
class Departure:
    """When (by the cache's clock), why and for whom a page left the tree."""

    time: float
    removal: Removal
    by: str | None


class History:
    """The last `capacity` pages that left the tree and have not come back."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"the number of evicted pages to remember is negative: {capacity}")
        self.capacity = capacity
        self._departures: OrderedDict[Name, Departure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._departures)

    def left(self, node: Node, first: int, departure: Departure) -> None:
        """The pages of `node` from `first` on are leaving."""
        if not self.capacity:
            return
        for name in node.chain[first:]:
            self._departures[name] = departure  # never there yet: it was in the tree
        while len(self._departures) > self.capacity:
            self._departures.popitem(last=False)

    def left_tier(self, names: Iterable[Name], departure: Departure) -> None:
        """Pages that had left the tree before are now gone for good."""
        for name in names:
            if name in self._departures:
                self._departures[name] = departure

    def came(self, node: Node, first: int) -> None:
        """The pages of `node` from `first` on are in the tree."""
        if self._departures:
            for name in node.chain[first:]:
                self._departures.pop(name, None)

    def departure(self, name: Name) -> Departure | None:
        """How the prefix of that name left, if it did and is remembered."""
        return self._departures.get(name)


class Reason(Enum):
    """Why tokens of a key are cached, or are not.

    That a prompt ends within a page is no reason: matching is exact to the token.
    """

    CACHED = "cached"
    IN_TIER = "in the tier"  # evicted, and kept there: they can come back
    EVICTED = "evicted"  # they were cached; `departure` says when and why they left
    DIVERGED = "diverged"  # prompts cached here go on with other tokens
    OTHER_NAMESPACE = "other namespace"  # cached for another model, adapter, salt or media
    NEVER_SEEN = "never seen"  # or seen so long ago that it is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens [start, end) of a key, and why they are cached or not."""

    start: int
    end: int
    reason: Reason
    departure: Departure | None = None
    namespace: Namespace | None = None

    def __str__(self) -> str:
        text = f"tokens {self.start} to {self.end - 1}: {self.reason.value}"
        if self.reason is Reason.DIVERGED:
            text += f" at token {self.start}"
        if self.departure is not None:
            text += f" at {self.departure.time} ({self.departure.removal.value}"
            text += f" by {self.departure.by})" if self.departure.by else ")"
        if self.namespace is not None:
            text += f": {self.namespace}"
        return text


@dataclass(frozen=True, slots=True)
class Explanation:
    """A key's tokens in stretches, from first to last, without gaps.

    `num_cached_tokens` are those in the tree; what is in the tier is a stretch of its own.
    """

    num_tokens: int
    num_cached_tokens: int
    stretches: tuple[Stretch, ...]

    def __str__(self) -> str:
        head = f"{self.num_cached_tokens} of {self.num_tokens} tokens are cached"
        return "\n".join([head, *(str(stretch) for stretch in self.stretches)])
