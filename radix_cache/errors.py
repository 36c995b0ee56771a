"""What a caller of the prefix cache can do wrong, or meet.

::

    RadixCacheError
    ├── StaleMatch (also RuntimeError)          pages of a match were evicted since: match again
    ├── LeaseReleased (also RuntimeError)       a lease or pin was used after its release
    ├── PageNotOwned (also ValueError)          page_id, state: a page is not the caller's to give
    ├── PinBudgetExceeded (also RuntimeError)   num_pages_needed, num_pages_left
    └── InvariantViolation (also AssertionError)  the bookkeeping is broken; only `check` raises it
"""

from __future__ import annotations


class RadixCacheError(Exception):
    """The root of everything the prefix cache raises on purpose."""


class StaleMatch(RadixCacheError, RuntimeError):
    """Pages that a match names left the tree before it was leased; match again."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"the match of {num_tokens} tokens is out of date: pages it names left the tree "
            "before it was leased; match again"
        )
        self.num_tokens = num_tokens


class LeaseReleased(RadixCacheError, RuntimeError):
    """A lease or pin was used, or released again, after its release."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: it was released before")


class PageNotOwned(RadixCacheError, ValueError):
    """A page was given away or freed by someone who does not own it."""

    def __init__(self, page_id: int, state: str) -> None:
        super().__init__(f"page {page_id} is {state}, expected one that the caller owns")
        self.page_id = page_id
        self.state = state


class PinBudgetExceeded(RadixCacheError, RuntimeError):
    """Pinning would pass the cache's budget of pinned pages."""

    def __init__(self, num_pages_needed: int, num_pages_left: int) -> None:
        super().__init__(
            f"pinning needs {num_pages_needed} more pages, the pin budget has {num_pages_left} left"
        )
        self.num_pages_needed = num_pages_needed
        self.num_pages_left = num_pages_left


class InvariantViolation(RadixCacheError, AssertionError):
    """The cache's own bookkeeping does not add up. Raised by `invariants.check` alone."""
