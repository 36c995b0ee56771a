"""Which pages are free, owned by a sequence, or in the tree. A page is an integer."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from palmette.radix_cache.errors import PageNotOwned


class PageState(IntEnum):
    """The one place a page is in."""

    FREE = 0  # in the pool
    OWNED = 1  # allocated, and not given to the tree: one sequence writes it
    CACHED = 2  # in the tree: written no more, read by any number of leases


# Plain numbers for the loops over pages: comparing members of an enum takes thrice as long.
_FREE, _OWNED, _CACHED = (state.value for state in PageState)


class PagePool:
    """A fixed number of pages, each in exactly one `PageState`. Every act is O(pages named)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._states = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; the lowest id is on top

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, page_id: int) -> PageState:
        """Where a page is. Raises IndexError for an id that is not of this pool."""
        if not 0 <= page_id < self.num_pages:
            raise IndexError(f"page {page_id} is not one of the pool's {self.num_pages}")
        return PageState(self._states[page_id])

    def allocate(self, num_pages: int) -> list[int] | None:
        """That many pages for the caller to own, or None and nothing changed."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        split = len(self._free) - num_pages
        page_ids = self._free[split:]
        del self._free[split:]
        page_ids.reverse()
        for page_id in page_ids:
            self._states[page_id] = _OWNED
        return page_ids

    def free(self, page_ids: Iterable[int]) -> None:
        """Take back pages that the caller owns: all of them, or PageNotOwned and none."""
        returned = list(page_ids)
        self.check_owned(returned)
        self._put_back(returned)

    def check_owned(self, page_ids: list[int]) -> None:
        """Raise PageNotOwned unless each page is owned and named once."""
        for page_id in page_ids:
            if not 0 <= page_id < self.num_pages:
                raise PageNotOwned(page_id, f"not one of the pool's {self.num_pages}")
            if self._states[page_id] != _OWNED:
                state = "free" if self._states[page_id] == _FREE else "in the tree"
                raise PageNotOwned(page_id, state)
        if len(set(page_ids)) != len(page_ids):
            twice = next(p for i, p in enumerate(page_ids) if p in page_ids[:i])
            raise PageNotOwned(twice, "named twice")

    def owned(self) -> list[int]:
        """Every page that a sequence owns, in order. O(num_pages): for checks, not for steps."""
        return self.in_state(PageState.OWNED)

    def in_state(self, state: PageState) -> list[int]:
        """Every page in it, in order. For checks, as `owned`."""
        wanted = state.value
        return [page_id for page_id, each in enumerate(self._states) if each == wanted]

    def free_page_ids(self) -> list[int]:
        """Every free page. For checks, as `owned`."""
        return list(self._free)

    # For the tree, which has checked its callers already.

    def give_to_tree(self, page_ids: list[int]) -> None:
        """Owned pages become cached."""
        for page_id in page_ids:
            assert self._states[page_id] == _OWNED, f"page {page_id} is not owned"
            self._states[page_id] = _CACHED

    def take_from_tree(self, page_ids: list[int]) -> None:
        """Cached pages become free."""
        for page_id in page_ids:
            assert self._states[page_id] == _CACHED, f"page {page_id} is not cached"
        self._put_back(page_ids)

    def _put_back(self, page_ids: list[int]) -> None:
        for page_id in page_ids:
            self._states[page_id] = _FREE
        self._free.extend(reversed(page_ids))
