"""What the cache tells observers, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from palmette.radix_cache.node import Namespace
from palmette.radix_cache.tree import Removal


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesInserted:
    """Pages joined the tree behind `num_tokens_before` tokens that end with `parent_page_id`.

    `token_ids` are those of the new pages; fewer than whole pages of them mean a partial tail.
    """

    namespace: Namespace
    num_tokens_before: int
    parent_page_id: int | None
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesEvicted:
    """Pages left the tree and are free. `by` is what the caller who needed room gave."""

    namespace: Namespace
    num_tokens_before: int
    token_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    removal: Removal
    by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """A lease was taken on `num_cached_tokens` of the `num_tokens` that were asked for."""

    namespace: Namespace
    num_tokens: int
    num_cached_tokens: int


class Observer(Protocol):
    """Told of every change at the end of the call that made it.

    Evicted pages hold their keys and values until that call returns, as nobody else could have
    written them yet: a slower tier may copy them meanwhile. An observer that raises is logged and
    told no more; the cache goes on.
    """

    def inserted(self, event: PagesInserted) -> None: ...
    def evicted(self, event: PagesEvicted) -> None: ...
    def hit(self, event: PrefixHit) -> None: ...


@dataclass(slots=True)
class CacheStats:
    """Counters since the start; they only grow."""

    num_matches: int = 0
    num_leases: int = 0  # counted ones: a resumed sequence is not a new lookup
    num_lookup_tokens: int = 0  # asked for by counted leases
    num_hit_tokens: int = 0  # of those, found in the tree
    num_inserted_pages: int = 0
    num_folded_pages: int = 0  # duplicates freed because the tree had the page
    num_evicted_pages: int = 0
    num_flushed_pages: int = 0
    num_subsumed_pages: int = 0  # partial tails that a longer page made useless

    @property
    def hit_rate(self) -> float:
        """Tokens found / tokens asked for; 0 before the first lease."""
        return self.num_hit_tokens / self.num_lookup_tokens if self.num_lookup_tokens else 0.0
