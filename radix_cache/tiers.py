"""A second place for pages: which prefixes are kept there, in which slots. A slot is an integer.

The tier is inclusive: a page that came back keeps its slot until others need it, so that it need
not be copied a second time when it is evicted again. Only whole pages are kept, so of a prefix
that comes back at most `page_size - 1` tokens are computed again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from palmette.radix_cache.errors import LeaseReleased
from palmette.radix_cache.names import Name
from palmette.radix_cache.node import Namespace

_log = logging.getLogger(__name__)

Store = Callable[[Sequence[int], Sequence[int]], None]
"""Copies what is in each page of the first list to its slot, in the second, before it returns."""


@dataclass(slots=True)
class TierStats:
    """Counters since the start; they only grow.

    `num_stored_pages - num_dropped_pages - num_flushed_pages` are there now.
    """

    num_stored_pages: int = 0  # given a slot when they were evicted
    num_kept_pages: int = 0  # evicted again and still there: nothing to copy
    num_refused_pages: int = 0  # evicted while every slot was promised
    num_dropped_pages: int = 0  # made room for others, or could not be copied
    num_flushed_pages: int = 0
    num_restored_pages: int = 0  # copied back


class Tier:
    """At most `num_slots` evicted pages, of which the least recently used go first.

    Nothing is moved here: `store` is called with pages and slots at the end of the call that
    evicted the pages, while nobody else can have written them. If it raises, what it was to copy is
    dropped. An error is logged, the tier takes no more pages, and the cache goes on; an interrupt
    (any other BaseException) goes to the caller, and the next eviction is copied as ever. O(1) for
    each page, but for flushing a single namespace.
    """

    def __init__(self, num_slots: int, store: Store) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.stats = TierStats()
        self._store: Store | None = store
        self._slots: dict[Name, int] = {}
        self._idle: OrderedDict[Name, None] = OrderedDict()  # not promised; the oldest comes first
        self._free = list(range(num_slots - 1, -1, -1))  # a stack; the lowest is on top
        self._namespaces: list[Namespace | None] = [None] * num_slots  # by slot
        self._num_promises = [0] * num_slots  # by slot
        self._moves: dict[int, int] = {}  # slot -> page whose contents are to be copied there

    def __contains__(self, name: Name) -> bool:
        return name in self._slots

    @property
    def num_pages(self) -> int:
        """How many pages are there now."""
        return len(self._slots)

    def promise(self, names: Sequence[Name]) -> Promise:
        """Keep these pages, which are all there, until they have been copied back."""
        slots = [self._slots[name] for name in names]
        for name, slot in zip(names, slots, strict=True):
            self._num_promises[slot] += 1
            self._idle.pop(name, None)
        return Promise(self, tuple(names), tuple(slots))

    def slots(self) -> dict[int, Namespace]:
        """Every slot that can be found by a name, and whose it is. For checks."""
        found = {}
        for slot in self._slots.values():
            namespace = self._namespaces[slot]
            assert namespace is not None
            found[slot] = namespace
        return found

    # For the cache.

    def take(self, namespace: Namespace, names: Sequence[Name], page_ids: Sequence[int]) -> None:
        """Whole pages that are being evicted, one behind the other."""
        if self._store is None:
            return
        # The last first, so that it is the first to go: without what is before it, it is no use.
        for name, page_id in zip(reversed(names), reversed(page_ids), strict=True):
            if name in self._slots:
                self.stats.num_kept_pages += 1
                if name in self._idle:
                    self._idle.move_to_end(name)
                continue
            slot = self._free_slot()
            if slot is None:
                self.stats.num_refused_pages += 1
                continue
            self.stats.num_stored_pages += 1
            self._slots[name] = slot
            self._idle[name] = None
            self._namespaces[slot] = namespace
            self._moves[slot] = page_id

    def carry_out(self) -> None:
        """Have what was taken copied. `drop_moves` comes behind it, whatever happens."""
        if not self._moves or self._store is None:
            return
        try:
            self._store(list(self._moves.values()), list(self._moves))
            self._moves = {}
        except Exception:
            _log.exception("evicted pages could not be copied; the tier takes no more")
            self._store = None

    def drop_moves(self) -> None:
        """Forget what was taken and is not copied: its pages may be others' by now."""
        moves = self._moves
        if not moves:
            return
        for name in [name for name, slot in self._slots.items() if slot in moves]:
            self.stats.num_dropped_pages += 1
            self._forget(name)
        self._moves = {}

    def flush(self, namespace: Namespace | None) -> list[Name]:
        """Drop what is there, of one namespace or of all; returns its names.

        The slots of what is promised are used again only once the promise is settled.
        """
        names = [
            name
            for name, slot in self._slots.items()
            if namespace is None or self._namespaces[slot] == namespace
        ]
        for name in names:
            self._forget(name)
        self.stats.num_flushed_pages += len(names)
        return names

    def settle(self, names: Sequence[Name], slots: Sequence[int]) -> None:
        """Take back a promise; what was promised counts as used now."""
        for name, slot in zip(reversed(names), reversed(slots), strict=True):
            self._num_promises[slot] -= 1
            if self._num_promises[slot]:
                continue
            if self._slots.get(name) == slot:
                self._idle[name] = None
            else:  # flushed meanwhile
                self._free.append(slot)

    def free_slots(self) -> list[int]:
        """For checks."""
        return list(self._free)

    def idle_slots(self) -> list[int]:
        """Those that others may have, in this order. For checks."""
        return [self._slots[name] for name in self._idle]

    def promised_slots(self) -> list[int]:
        """For checks."""
        return [slot for slot, count in enumerate(self._num_promises) if count]

    @property
    def has_moves(self) -> bool:
        """Whether something was taken and is not copied yet. For checks."""
        return bool(self._moves)

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        name, _ = self._idle.popitem(last=False)
        self.stats.num_dropped_pages += 1
        return self._slots.pop(name)

    def _forget(self, name: Name) -> None:
        slot = self._slots.pop(name)
        self._idle.pop(name, None)
        self._namespaces[slot] = None
        if not self._num_promises[slot]:
            self._free.append(slot)


class Promise:
    """Pages of a tier that are about to be copied back: their slots keep their contents.

    Settled exactly once, by `fulfil` after the copying or by `cancel`.
    """

    __slots__ = ("_is_settled", "_names", "_tier", "slots")

    def __init__(self, tier: Tier | None, names: tuple[Name, ...], slots: tuple[int, ...]) -> None:
        self.slots = slots
        self._names = names
        self._tier = tier  # None only where there is nothing
        self._is_settled = False

    @property
    def num_pages(self) -> int:
        return len(self.slots)

    def fulfil(self) -> None:
        """The contents were copied back. Raises LeaseReleased the second time."""
        self._settle("fulfil")
        if self._tier is not None:
            self._tier.stats.num_restored_pages += len(self.slots)

    def cancel(self) -> None:
        """They are not wanted after all. Raises LeaseReleased the second time."""
        self._settle("cancel")

    def _settle(self, act: str) -> None:
        if self._is_settled:
            raise LeaseReleased(act)
        self._is_settled = True
        if self._tier is not None:
            self._tier.settle(self._names, self.slots)
