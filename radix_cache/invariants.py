"""Whether the cache's bookkeeping adds up. O(everything): for tests and debugging."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from palmette.radix_cache.cache import RadixCache
from palmette.radix_cache.errors import InvariantViolation
from palmette.radix_cache.names import page_names, root_name
from palmette.radix_cache.node import Node
from palmette.radix_cache.pages import PageState
from palmette.radix_cache.tiers import Tier


def check(cache: RadixCache, owned: Iterable[int] | None = None) -> None:
    """Raise InvariantViolation unless every page is in exactly one place and every count is right.

    `owned` are the pages that the caller's sequences own, if the caller knows.
    """
    nodes = list(cache.tree.nodes())
    _check_ledger(cache, nodes, owned)
    for node in nodes:
        _check_shape(cache, node)
        _check_children(node)
        _check_holds(node)
    _check_counts(cache, nodes)
    _check_queue(cache, nodes)
    _check_names(cache, nodes)
    if cache.tier is not None:
        _check_tier(cache.tier)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _check_ledger(cache: RadixCache, nodes: list[Node], owned: Iterable[int] | None) -> None:
    pages = cache.pages
    cached = [page_id for node in nodes for page_id in node.page_ids]
    _require(len(set(cached)) == len(cached), "a page is in the tree twice")
    states = [pages.state(page_id) for page_id in range(pages.num_pages)]
    in_tree = {page_id for page_id, state in enumerate(states) if state is PageState.CACHED}
    _require(in_tree == set(cached), f"by state or by tree, not both: {in_tree ^ set(cached)}")
    free = pages.free_page_ids()
    _require(len(set(free)) == len(free), "a page is free twice")
    _require(
        set(free) == {page_id for page_id, state in enumerate(states) if state is PageState.FREE},
        "the free pages and their states differ",
    )
    if owned is not None:
        listed = list(owned)
        _require(len(set(listed)) == len(listed), "a page is owned twice")
        _require(
            set(listed) == set(pages.owned()),
            f"owned by nobody, or not owned after all: {set(listed) ^ set(pages.owned())}",
        )
    for page_id in cache.pages_with_logprobs():
        _require(page_id in in_tree, f"log-probabilities of page {page_id}, not in the tree")


def _check_shape(cache: RadixCache, node: Node) -> None:
    size = cache.page_size
    _require(node.is_attached, f"{node!r} is in the tree and marked as gone")
    _require(len(node.chain) == len(node.page_ids), f"{node!r}: chain and pages differ in length")
    if node.parent is None:
        _require(not node.page_ids, "a root has pages")
        _require(cache.tree.roots.get(node.namespace) is node, "a root is not under its namespace")
        _require(node.children is not None or node.holds > 0, "an idle root was kept")
        return
    _require(node.start == node.parent.end, f"{node!r} does not start where its parent ends")
    _require(node.namespace == node.parent.namespace, f"{node!r} is in another namespace")
    _require(node.whole_access <= node.last_access, f"{node!r}: its end was used after all of it")
    if node.is_tail:
        _require(len(node.page_ids) == 1, f"{node!r} is a tail of more than one page")
        _require(
            0 < len(node.first_page) < size and not node.rest,
            f"{node!r} is a tail of a whole page or nothing",
        )
        _require(node.children is None, f"{node!r} is a tail and has children")
        _require(
            node.holds > 0 or not cache.tree.is_subsumed(node), f"{node!r} is useless and was kept"
        )
    else:
        _require(bool(node.page_ids), f"{node!r} has no pages")
        _require(
            len(node.first_page) == size and len(node.rest) == size * (len(node.page_ids) - 1),
            f"{node!r} is not whole pages",
        )


def _check_children(node: Node) -> None:
    if node.children is None:
        return
    _require(bool(node.children.by_key), f"{node!r} keeps an empty index of children")
    ordered = list(node.children.ordered())
    _require(set(ordered) == set(node.children.by_key), f"{node!r}: order and children differ")
    _require(all(a < b for a, b in pairwise(ordered)), f"{node!r}: children out of order")
    _require(node.children.is_sound(), f"{node!r}: the blocks of the order are off")
    children = node.children.by_key.items()
    _require(
        node.children.num_tails == sum(child.is_tail for _, child in children),
        f"{node!r}: tails miscounted",
    )
    for key, child in children:
        _require(child.parent is node, f"{child!r} does not know its parent {node!r}")
        _require(child.first_page == key, f"{child!r} is under another key")


def _check_holds(node: Node) -> None:
    children = list(node.children.by_key.values()) if node.children is not None else []
    num_held = sum(child.holds > 0 for child in children)
    num_pinned = sum(child.pins > 0 for child in children)
    _require(node.holds >= num_held, f"{node!r} has {num_held} held children")
    _require(node.pins >= num_pinned, f"{node!r} has {num_pinned} pinned children")
    _require(node.holds > 0 or node.pins == 0, f"{node!r} is pinned and not held")


def _check_counts(cache: RadixCache, nodes: list[Node]) -> None:
    tree = cache.tree
    inner = [node for node in nodes if node.parent is not None]
    expected = {
        "nodes": (tree.num_nodes, len(inner)),
        "pages": (tree.num_pages, sum(len(n.page_ids) for n in inner)),
        "evictable pages": (
            tree.num_evictable_pages,
            sum(len(n.page_ids) for n in inner if not n.holds),
        ),
        "pinned pages": (
            tree.num_pinned_pages,
            sum(len(n.page_ids) for n in inner if n.pins),
        ),
        "holds": (
            tree.num_holds,
            sum(n.holds for n in nodes) - sum(n.holds > 0 for n in inner),
        ),
    }
    for what, (counted, found) in expected.items():
        _require(counted == found, f"{counted} {what} counted, {found} found")
    _require(tree.num_pinned_pages <= cache.max_pinned_pages, "more pages pinned than allowed")


def _check_queue(cache: RadixCache, nodes: list[Node]) -> None:
    live = cache.tree.queue.tickets()
    for node in nodes:
        if node.ticket:
            _require(node.ticket in live, f"{node!r} has a ticket and no entry")
            _require(node.queued_at <= node.last_access, f"{node!r} is queued as newer than it is")
        _require(
            bool(node.ticket) or not node.is_evictable_leaf, f"{node!r} would never be evicted"
        )
    num_live = sum(node.ticket > 0 for node in nodes)
    _require(cache.tree.queue.num_live == num_live, f"{num_live} live entries were miscounted")
    _require(len(cache.tree.queue) <= 2 * len(nodes) + 66, "the eviction queue holds garbage")


def _check_names(cache: RadixCache, nodes: list[Node]) -> None:
    for node in nodes:
        if node.parent is not None:
            above = node.parent
            before = above.chain[-1] if above.parent is not None else root_name(node.namespace)
            token_ids = node.token_ids_from(0, cache.page_size)
            named = page_names(before, token_ids, cache.page_size)
            _require(node.chain == named, f"{node!r} has other names than its tokens")


def _check_tier(tier: Tier) -> None:
    found, free, idle = tier.slots(), tier.free_slots(), tier.idle_slots()
    promised = tier.promised_slots()
    _require(len(found) == tier.num_pages, "two names have one slot")
    _require(len(set(free)) == len(free), "a slot is free twice")
    _require(not set(free) & set(promised), "a promised slot is free")
    _require(not set(free) & set(found), "a slot that has a name is free")
    _require(
        set(free) | set(found) | set(promised) == set(range(tier.num_slots)), "a slot was lost"
    )
    _require(len(set(idle)) == len(idle), "a slot could be given up twice")
    _require(set(idle) == set(found) - set(promised), "others could have what is promised")
    _require(not tier.has_moves, "pages were taken and never copied")
    stats = tier.stats
    num_there = stats.num_stored_pages - stats.num_dropped_pages - stats.num_flushed_pages
    _require(num_there == tier.num_pages, f"{tier.num_pages} pages there, {num_there} counted")
