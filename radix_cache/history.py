"""What left the tree lately, and why a prompt was not cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from palmette.radix_cache.names import Name
from palmette.radix_cache.node import Namespace, Node, common_prefix_length
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
        self._pages: OrderedDict[Name, _Left] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def left(self, node: Node, first: int, page_size: int, departure: Departure) -> None:
        """The pages of `node` from `first` on are leaving."""
        if not self.capacity:
            return
        pages = self._pages
        # The first of so many that all are forgotten again need not be noted.
        first = max(first, len(node.chain) - self.capacity)
        before = node.name_before(first)
        token_ids = node.token_ids_from(first, page_size)
        start = 0
        for name in node.chain[first:]:
            end = start + page_size
            pages[name] = _Left(before, token_ids[start:end], departure)  # it was in the tree
            before = name
            start = end
        while len(pages) > self.capacity:
            pages.popitem(last=False)

    def left_tier(self, names: Iterable[Name], departure: Departure) -> None:
        """Pages that had left the tree before are now gone for good."""
        for name in names:
            left = self._pages.get(name)
            if left is not None:
                self._pages[name] = left._replace(departure=departure)

    def came(self, node: Node, first: int) -> None:
        """The pages of `node` from `first` on are in the tree."""
        if self._pages:
            for name in node.chain[first:]:
                self._pages.pop(name, None)

    def departure_after(
        self, before: Name, name: Name | None, page: list[int]
    ) -> tuple[int, Departure | None]:
        """The longest beginning of `page` that is remembered behind the prefix `before`, and how
        the page that began so left. `name` is that of the whole `page`: O(1) where it is known,
        else O(pages remembered), which is once for each key that is explained.
        """
        left = None if name is None else self._pages.get(name)
        if left is not None:
            return len(page), left.departure
        key = tuple(page)
        longest, departure = 0, None
        for left in self._pages.values():
            if left.before == before:
                length = common_prefix_length(left.token_ids, key)
                if length > longest:
                    longest, departure = length, left.departure
        return longest, departure


class _Left(NamedTuple):
    """A page that left: the name of what is before it, its tokens, and how it left."""

    before: Name
    token_ids: tuple[int, ...]
    departure: Departure


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
