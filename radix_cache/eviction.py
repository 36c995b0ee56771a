"""Which leaf was used least recently: a heap with at most one live entry per leaf."""

from __future__ import annotations

import heapq
from itertools import count

from palmette.radix_cache.node import Node


class EvictionQueue:
    """Unheld leaves, least recently used first, in O(log n) amortised.

    An entry's time is a lower bound of its node's last access: a touch leaves the entry alone, and
    `oldest` moves entries that turn out to be out of date. An entry of a node that is no longer an
    unheld leaf goes when it surfaces. Entries of nodes that left the tree are swept out once they
    outnumber the live ones, so the heap never grows past twice the number of nodes.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._tickets = count(1)
        self.num_live = 0  # entries of nodes in the tree

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Consider `node` once it is the oldest, if it is an unheld leaf by then."""
        if node.ticket:
            if node.last_access >= node.queued_at:
                return
            self.forget(node)
        self._push(node)

    def forget(self, node: Node) -> None:
        """`node` left the tree."""
        if node.ticket:
            node.ticket = 0
            self.num_live -= 1
            if len(self._heap) > 2 * self.num_live + 64:
                self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
                heapq.heapify(self._heap)

    def oldest(self) -> Node | None:
        """The unheld leaf used least recently; it stays in the queue."""
        heap = self._heap
        while heap:
            _, ticket, node = heap[0]
            if ticket != node.ticket:
                heapq.heappop(heap)
            elif not node.is_evictable_leaf:
                heapq.heappop(heap)
                node.ticket = 0
                self.num_live -= 1
            elif node.last_access != node.queued_at:
                node.queued_at = node.last_access
                node.ticket = next(self._tickets)
                heapq.heapreplace(heap, (node.last_access, node.ticket, node))
            else:
                return node
        return None

    def tickets(self) -> set[int]:
        """Of every entry. For checks."""
        return {ticket for _, ticket, _ in self._heap}

    def _push(self, node: Node) -> None:
        node.ticket = next(self._tickets)
        node.queued_at = node.last_access
        self.num_live += 1
        heapq.heappush(self._heap, (node.last_access, node.ticket, node))
