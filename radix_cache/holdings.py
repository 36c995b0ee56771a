"""What leases keep in the tree between them: for who decides whose pages to give up."""

from __future__ import annotations

from collections.abc import Iterable

from palmette.radix_cache.lease import Lease, Match
from palmette.radix_cache.node import Node


def num_pages_freed_without(leases: Iterable[Lease]) -> int:
    """How many pages nobody would hold any more if all these leases were released.

    Pages that another lease or pin holds as well do not count. O(edges on the way to the roots).
    """
    num_gone: dict[Node, int] = {}  # of each node's holds
    for lease in leases:
        for node in lease.held_nodes():
            num_gone[node] = num_gone.get(node, 0) + 1
    num_pages = 0
    stack = [node for node, gone in num_gone.items() if gone == node.holds]
    while stack:
        node = stack.pop()
        if node.parent is None:
            continue
        num_pages += len(node.page_ids)
        # A node holds its parent once, however often it is held itself.
        gone = num_gone[node.parent] = num_gone.get(node.parent, 0) + 1
        if gone == node.parent.holds:
            stack.append(node.parent)
    return num_pages


def num_unheld_pages(match: Match) -> int:
    """How many whole pages of the match nobody holds: leasing it makes them unavailable.

    The match must be of the cache as it is now. O(edges on the way to the first held one).
    """
    node = match.found.node
    # Of the last edge the match may cover a part only.
    end = len(match.page_ids)
    num_pages = 0
    while node is not None and node.parent is not None and not node.holds:
        num_pages += end - node.start
        end = node.start
        node = node.parent
    return num_pages
