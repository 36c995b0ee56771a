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


def _require(condition: bool, message: str, *values: object) -> None:
    """`values` are what the braces of `message` stand for; most messages are never written."""
    if not condition:
        raise InvariantViolation(message.format(*values))


def _check_ledger(cache: RadixCache, nodes: list[Node], owned: Iterable[int] | None) -> None:
    pages = cache.pages
    cached = [page_id for node in nodes for page_id in node.page_ids]
    _require(len(set(cached)) == len(cached), "a page is in the tree twice")
    in_tree = set(pages.in_state(PageState.CACHED))
    _require(in_tree == set(cached), "by state or by tree, not both: {}", in_tree ^ set(cached))
    free = pages.free_page_ids()
    _require(len(set(free)) == len(free), "a page is free twice")
    _require(
        set(free) == set(pages.in_state(PageState.FREE)), "the free pages and their states differ"
    )
    if owned is not None:
        listed = list(owned)
        _require(len(set(listed)) == len(listed), "a page is owned twice")
        _require(
            set(listed) == set(pages.owned()),
            "owned by nobody, or not owned after all: {}",
            set(listed) ^ set(pages.owned()),
        )
    for page_id in cache.pages_with_logprobs():
        _require(page_id in in_tree, "log-probabilities of page {}, not in the tree", page_id)


def _check_shape(cache: RadixCache, node: Node) -> None:
    size = cache.page_size
    _require(node.is_attached, "{!r} is in the tree and marked as gone", node)
    _require(len(node.chain) == len(node.page_ids), "{!r}: chain and pages differ in length", node)
    if node.parent is None:
        _require(not node.page_ids, "a root has pages")
        _require(cache.tree.roots.get(node.namespace) is node, "a root is not under its namespace")
        _require(node.children is not None or node.holds > 0, "an idle root was kept")
        return
    _require(node.start == node.parent.end, "{!r} does not start where its parent ends", node)
    _require(node.namespace == node.parent.namespace, "{!r} is in another namespace", node)
    _require(node.whole_access <= node.last_access, "{!r}: its end was used after all of it", node)
    if node.is_tail:
        _require(len(node.page_ids) == 1, "{!r} is a tail of more than one page", node)
        _require(
            0 < len(node.first_page) < size and not node.rest,
            "{!r} is a tail of a whole page or nothing",
            node,
        )
        _require(node.children is None, "{!r} is a tail and has children", node)
        _require(
            node.holds > 0 or not cache.tree.is_subsumed(node), "{!r} is useless and was kept", node
        )
    else:
        _require(bool(node.page_ids), "{!r} has no pages", node)
        _require(
            len(node.first_page) == size and len(node.rest) == size * (len(node.page_ids) - 1),
            "{!r} is not whole pages",
            node,
        )


def _check_children(node: Node) -> None:
    if node.children is None:
        return
    _require(bool(node.children.by_key), "{!r} keeps an empty index of children", node)
    ordered = list(node.children.ordered())
    _require(set(ordered) == set(node.children.by_key), "{!r}: order and children differ", node)
    _require(all(a < b for a, b in pairwise(ordered)), "{!r}: children out of order", node)
    _require(node.children.is_sound(), "{!r}: the blocks of the order are off", node)
    children = node.children.by_key.items()
    _require(
        node.children.num_tails == sum(child.is_tail for _, child in children),
        "{!r}: tails miscounted",
        node,
    )
    for key, child in children:
        _require(child.parent is node, "{!r} does not know its parent {!r}", child, node)
        _require(child.first_page == key, "{!r} is under another key", child)


def _check_holds(node: Node) -> None:
    children = list(node.children.by_key.values()) if node.children is not None else []
    num_held = sum(child.holds > 0 for child in children)
    num_pinned = sum(child.pins > 0 for child in children)
    _require(node.holds >= num_held, "{!r} has {} held children", node, num_held)
    _require(node.pins >= num_pinned, "{!r} has {} pinned children", node, num_pinned)
    _require(node.holds > 0 or node.pins == 0, "{!r} is pinned and not held", node)


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
        _require(counted == found, "{} {} counted, {} found", counted, what, found)
    _require(tree.num_pinned_pages <= cache.max_pinned_pages, "more pages pinned than allowed")


def _check_queue(cache: RadixCache, nodes: list[Node]) -> None:
    live = cache.tree.queue.tickets()
    for node in nodes:
        if node.ticket:
            _require(node.ticket in live, "{!r} has a ticket and no entry", node)
            _require(node.queued_at <= node.last_access, "{!r} is queued as newer than it is", node)
        _require(
            bool(node.ticket) or not node.is_evictable_leaf, "{!r} would never be evicted", node
        )
    num_live = sum(node.ticket > 0 for node in nodes)
    _require(cache.tree.queue.num_live == num_live, "{} live entries were miscounted", num_live)
    _require(len(cache.tree.queue) <= 2 * len(nodes) + 66, "the eviction queue holds garbage")


def _check_names(cache: RadixCache, nodes: list[Node]) -> None:
    for node in nodes:
        if node.parent is not None:
            above = node.parent
            before = above.chain[-1] if above.parent is not None else root_name(node.namespace)
            token_ids = node.token_ids_from(0, cache.page_size)
            named = page_names(before, token_ids, cache.page_size)
            _require(node.chain == named, "{!r} has other names than its tokens", node)


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
    _require(num_there == tier.num_pages, "{} pages there, {} counted", tier.num_pages, num_there)
