"""Prefixes that come into the cache, and leave it, by other ways than being computed."""

from __future__ import annotations

from collections.abc import Sequence

from palmette.errors import CacheFull
from palmette.radix_cache import Match, Namespace, Pin, PinBudgetExceeded
from palmette.radix_cache.node import common_prefix_length
from palmette.runtime.kv.frozen import FrozenPrefix
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.kv.pool import KVPool

# Frozen prefixes are nobody's secret: they belong to requests without a salt.
_NAMESPACE = Namespace()


class PrefixStore:
    """Copies prefixes out of the pool and into it, and pins them. To be used between steps."""

    def __init__(self, kv: KVManager, pool: KVPool) -> None:
        self._kv = kv
        self._pool = pool
        self._pins: dict[tuple[int, ...], Pin] = {}

    def copy(self, token_ids: Sequence[int]) -> FrozenPrefix | None:
        """A copy of the keys and values of `token_ids`; None unless all of them are cached."""
        match = self._kv.cache.match(token_ids, _NAMESPACE)
        if match.num_tokens < len(token_ids):
            return None
        pages = [*match.page_ids, *([match.tail.page_id] if match.tail else [])]
        return FrozenPrefix(tuple(token_ids), self._pool.read_tokens(pages, len(token_ids)))

    def add(self, prefix: FrozenPrefix, *, pin: bool) -> None:
        """Cache the prefix as if it had been computed, and keep it there if `pin`.

        Raises CacheFull if the pool or the pin budget has no room for it; nothing is cached or
        pinned then.
        """
        if prefix.token_ids in self._pins:
            return
        match = self._kv.cache.match(prefix.token_ids, _NAMESPACE)
        if match.num_tokens < len(prefix.token_ids):
            self._write(prefix, pin=pin)
            match = self._kv.cache.match(prefix.token_ids, _NAMESPACE)
        if pin:
            self._pins = {**self._pins, prefix.token_ids: self._pin(match)}

    def num_pages_out_of_reach(self, token_ids: Sequence[int], salt: str) -> int:
        """How many pages a request with this prompt can never have: those pinned with other tokens.

        May be asked from any thread.
        """
        pins = self._pins  # replaced and never changed
        if not pins:
            return 0
        num_shared = 0
        if salt == _NAMESPACE.salt:
            # The last token of a prompt is computed, so its page is the request's own.
            key = tuple(token_ids[:-1])
            num_shared = max(common_prefix_length(key, pinned) for pinned in pins)
        return self._kv.cache.num_pinned_pages - num_shared // self._kv.page_size

    def unpin_all(self) -> None:
        """What was pinned stays cached, and may be evicted from now on."""
        pins, self._pins = self._pins, {}
        for pin in pins.values():
            pin.release()

    def _write(self, prefix: FrozenPrefix, *, pin: bool) -> None:
        """Put the part that is not cached into pages and give them to the tree."""
        cache, page_size = self._kv.cache, self._kv.page_size
        token_ids = prefix.token_ids
        held = cache.match(token_ids[: len(token_ids) // page_size * page_size], _NAMESPACE)
        num_cached = len(held.page_ids) * page_size
        held = cache.match(token_ids[:num_cached], _NAMESPACE)
        num_pages = self._kv.num_pages_for(len(token_ids)) - len(held.page_ids)
        # Held in the way it will be held in the end, so that the budget counts no page twice.
        with self._pin(held) if pin else cache.lease(held, counted=False):
            if pin:
                num_left = cache.max_pinned_pages - cache.num_pinned_pages
                if num_pages > num_left:
                    raise _over_budget(num_pages, num_left, cache.max_pinned_pages)
            page_ids = cache.allocate(num_pages, by="thaw")
            if page_ids is None:
                raise CacheFull(
                    f"the prefix needs {num_pages} more pages of {page_size} tokens, the KV pool "
                    f"has {cache.num_available} that are free or can be evicted",
                    num_pages_needed=num_pages,
                    num_pages_left=cache.num_available,
                )
            self._pool.write_tokens(page_ids, prefix.keys_and_values[:, :, :, num_cached:])
            cache.insert(token_ids, [*held.page_ids, *page_ids], _NAMESPACE)

    def _pin(self, match: Match) -> Pin:
        cache = self._kv.cache
        try:
            return cache.pin(match)
        except PinBudgetExceeded as error:
            raise _over_budget(
                error.num_pages_needed, error.num_pages_left, cache.max_pinned_pages
            ) from error


def _over_budget(num_needed: int, num_left: int, budget: int) -> CacheFull:
    return CacheFull(
        f"pinning the prefix needs {num_needed} more pages, {num_left} are left of the {budget} "
        "that may be pinned: enlarge the pool, or thaw with pin=False",
        num_pages_needed=num_needed,
        num_pages_left=num_left,
    )
