"""Short forms for what the tests of the prefix cache do again and again."""

from __future__ import annotations

from collections.abc import Sequence

from palmette.radix_cache import Lease, Namespace, Published, RadixCache


def tokens(first: int, last: int) -> list[int]:
    """The tokens `first` to `last`, both included."""
    return list(range(first, last + 1))


def insert(
    cache: RadixCache, token_ids: Sequence[int], namespace: Namespace | None = None
) -> Published:
    """Put a sequence in the tree, in pages of its own."""
    pages = cache.allocate(-(-len(token_ids) // cache.page_size))
    assert pages is not None
    return cache.insert(token_ids, pages, namespace or Namespace())


def run(cache: RadixCache, token_ids: Sequence[int], *, tail: bool = False) -> Lease:
    """Lease what is cached of a sequence, compute the rest and publish it; still leased."""
    lease = cache.match_and_lease(token_ids)
    lease.drop_tail()
    pages = cache.allocate(-(-len(token_ids) // cache.page_size) - lease.num_pages)
    assert pages is not None
    lease.publish(token_ids, [*lease.page_ids, *pages], tail=tail)
    return lease


def num_cached(
    cache: RadixCache, token_ids: Sequence[int], namespace: Namespace | None = None
) -> int:
    """How many tokens are cached; counts as a use."""
    return cache.match(token_ids, namespace or Namespace()).num_tokens
