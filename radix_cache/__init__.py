"""Which token prefixes are cached in which pages. A page is an integer.

A library of its own, on the standard library alone. Whoever computes keys and values keeps them in
numbered pages of some tokens each; this cache says which pages hold a prefix that was computed
before, keeps them while they are in use, and finds room by evicting what was used least recently:

>>> from palmette.radix_cache import Namespace, RadixCache
>>> cache = RadixCache(num_pages=8, page_size=4)

A first sequence of ten tokens finds nothing, computes them in three pages of its own, and gives
the pages to the tree: two whole ones and a partial tail.

>>> tenant = Namespace(model="tiny", salt="tenant-7")
>>> prompt = [11, 12, 13, 14, 21, 22, 23, 24, 31, 32]
>>> with cache.match_and_lease(prompt, tenant) as lease:
...     block_table = cache.allocate(3)
...     published = lease.publish(prompt, block_table, tail=True)
>>> block_table, published.page_ids, published.tail
([0, 1, 2], (0, 1), Tail(page_id=2, num_tokens=2))

A second one shares nine tokens. The whole pages are used as they are; the tail page is copied into
a page of its own before the sequence writes behind its first token.

>>> question = [11, 12, 13, 14, 21, 22, 23, 24, 31, 99]
>>> match = cache.match(question, tenant)
>>> match.num_tokens, match.page_ids, match.tail
(9, (0, 1), Tail(page_id=2, num_tokens=1))
>>> lease = cache.lease(match)
>>> own = cache.allocate(1)  # copy the keys and values of one token from page 2 into it, then:
>>> lease.drop_tail()

What a lease holds is never evicted; the rest goes when room is needed.

>>> cache.evict(100), cache.num_available
(1, 5)
>>> print(cache.explain(prompt, tenant))
8 of 10 tokens are cached
tokens 0 to 7: cached
tokens 8 to 9: evicted at 4 (evicted)
>>> lease.release()
>>> cache.pages.free(own)
>>> cache.num_available
8

Other tenants see none of it.

>>> cache.match(prompt, Namespace(model="tiny", salt="tenant-8")).num_tokens
0

A tier keeps evicted pages in a second place, from where they come back.

>>> from palmette.radix_cache import Tier
>>> stored = []
>>> tier = Tier(num_slots=4, store=lambda page_ids, slots: stored.append((page_ids, slots)))
>>> small = RadixCache(num_pages=2, page_size=4, tier=tier)
>>> small.insert(prompt[:8], small.allocate(2)).page_ids
(0, 1)
>>> small.evict(1), stored  # copy page 1 to slot 0 now
(1, [([1], [0])])
>>> lease = small.match_and_lease(prompt)
>>> promise = lease.promise(prompt)
>>> lease.num_tokens, promise.slots
(4, (0,))
>>> own = small.allocate(1)  # copy slot 0 to page 1, then:
>>> promise.fulfil()
>>> lease.publish(prompt[:8], [0, *own]).page_ids
(0, 1)
"""

from palmette.radix_cache import invariants
from palmette.radix_cache.cache import RadixCache
from palmette.radix_cache.errors import (
    InvariantViolation,
    LeaseReleased,
    PageNotOwned,
    PinBudgetExceeded,
    RadixCacheError,
    StaleMatch,
)
from palmette.radix_cache.events import (
    CacheStats,
    Observer,
    PagesEvicted,
    PagesInserted,
    PrefixHit,
)
from palmette.radix_cache.history import Departure, Explanation, Reason, Stretch
from palmette.radix_cache.holdings import num_pages_freed_without, num_unheld_pages
from palmette.radix_cache.lease import Lease, Match, Pin, Published, Tail
from palmette.radix_cache.node import Namespace
from palmette.radix_cache.pages import PagePool, PageState
from palmette.radix_cache.tiers import Promise, Tier, TierStats
from palmette.radix_cache.tree import Removal

__all__ = [
    "CacheStats",
    "Departure",
    "Explanation",
    "InvariantViolation",
    "Lease",
    "LeaseReleased",
    "Match",
    "Namespace",
    "Observer",
    "PageNotOwned",
    "PagePool",
    "PageState",
    "PagesEvicted",
    "PagesInserted",
    "Pin",
    "PinBudgetExceeded",
    "PrefixHit",
    "Promise",
    "Published",
    "RadixCache",
    "RadixCacheError",
    "Reason",
    "Removal",
    "StaleMatch",
    "Stretch",
    "Tail",
    "Tier",
    "TierStats",
    "invariants",
    "num_pages_freed_without",
    "num_unheld_pages",
]
