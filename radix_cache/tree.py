"""The prefix tree: walking, splitting, growing and shrinking it, and who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from palmette.radix_cache.eviction import EvictionQueue
from palmette.radix_cache.names import page_names
from palmette.radix_cache.node import Children, Namespace, Node, PageKey, common_prefix_length
from palmette.radix_cache.pages import PagePool


class Removal(Enum):
    """Why pages left the tree."""

    EVICTED = "evicted"  # least recently used when room was needed
    FLUSHED = "flushed"  # by `flush`
    SUBSUMED = "subsumed"  # a partial tail whose tokens a longer page holds as well


class Watcher(Protocol):
    """What the tree tells its owner. Called while the tree changes: note it, change nothing."""

    def pages_added(self, node: Node, first: int) -> None:
        """The pages `node.page_ids[first:]` are new in the tree."""
        ...

    def pages_leaving(self, node: Node, first: int, removal: Removal) -> None:
        """The pages `node.page_ids[first:]` are about to leave the tree."""
        ...


@dataclass(slots=True)
class Walk:
    """How far a key leads: `num_pages` pages into the edge of `node`, and `page_ids` on the way.

    `tail_node.page_ids[tail_index]` begins with the next `num_tail_tokens` tokens of the key.
    """

    node: Node
    num_pages: int
    page_ids: list[int]
    tail_node: Node | None = None
    tail_index: int = 0
    num_tail_tokens: int = 0


class Tree:
    """Edges of whole pages under one root per namespace. Nothing here recurses."""

    def __init__(self, pages: PagePool, page_size: int, watcher: Watcher) -> None:
        self.page_size = page_size
        self.pages = pages
        self.roots: dict[Namespace, Node] = {}
        self.queue = EvictionQueue()
        self.num_nodes = 0  # roots excluded
        self.num_pages = 0
        self.num_evictable_pages = 0
        self.num_pinned_pages = 0
        self.num_holds = 0  # of leases and pins, on nodes
        self._watcher = watcher

    # Looking

    def root(self, namespace: Namespace) -> Node:
        """The root of `namespace`, made if there is none. Hold it, or call `forget_if_idle`."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, 0, (), [], [], [], 0)
        return root

    def walk(self, start: Node, key: list[int]) -> Walk:
        """Follow `key` from the end of `start`."""
        size = self.page_size
        node = start
        children = node.children
        page_ids: list[int] = []
        position = 0
        while children is not None:
            first_page = tuple(key[position : position + size])
            child = children.by_key.get(first_page)
            if child is None or child.is_tail:
                walk = Walk(node, len(node.page_ids), page_ids)
                self._find_tail(walk, children, first_page)
                return walk
            position += size
            rest = child.rest
            end = position + len(rest)
            if rest and key[position:end] != rest:
                return self._partial_walk(child, key[position:end], page_ids)
            page_ids += child.page_ids
            node = child
            children = node.children
            position = end
        return Walk(node, len(node.page_ids), page_ids)

    def _partial_walk(self, node: Node, rest: list[int], page_ids: list[int]) -> Walk:
        """The key has the first page of `node`, and then `rest`, which is not that of the edge."""
        shared = self.page_size + common_prefix_length(rest, node.rest)
        num_pages, num_tail_tokens = divmod(shared, self.page_size)
        page_ids += node.page_ids[:num_pages]
        walk = Walk(node, num_pages, page_ids)
        if num_tail_tokens:
            walk.tail_node = node
            walk.tail_index = num_pages
            walk.num_tail_tokens = num_tail_tokens
        return walk

    def _find_tail(self, walk: Walk, children: Children, rest: PageKey) -> None:
        """Note the child whose first page shares most tokens with `rest`."""
        for key in (children.at_or_after(rest), children.before(rest)):
            if key is not None:
                shared = common_prefix_length(key, rest)
                if shared > walk.num_tail_tokens:
                    walk.tail_node = children.by_key[key]
                    walk.num_tail_tokens = shared

    # Growing

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut the edge of `node` after `num_pages` pages; the new upper part is returned.

        The lower part stays the same object, so that leases that end at it still do. What used
        only a part of the edge is taken to have used the upper one.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        assert 0 < num_pages < len(node.page_ids)
        cut = (num_pages - 1) * self.page_size
        end_of_page = cut + self.page_size
        upper = Node(
            node.namespace,
            parent,
            node.start,
            node.first_page,
            node.rest[:cut],
            node.page_ids[:num_pages],
            node.chain[:num_pages],
            node.last_access,
        )
        node.first_page = tuple(node.rest[cut:end_of_page])
        del node.rest[:end_of_page]
        del node.page_ids[:num_pages]
        del node.chain[:num_pages]
        node.start += num_pages
        node.parent = upper
        upper.holds = 1 if node.holds else 0
        upper.pins = 1 if node.pins else 0
        upper.children = Children()
        upper.children.add(node.first_page, node)
        parent.children.replace(upper.first_page, upper)
        self.num_nodes += 1
        node.touch(node.whole_access)
        # Its last access may lie further back now, and an entry in the queue must not be later.
        if node.ticket or node.is_evictable_leaf:
            self.queue.offer(node)
        return upper

    def attach(self, parent: Node, token_ids: list[int], page_ids: list[int], now: int) -> Node:
        """A new leaf below the end of `parent`; owned pages move to the tree.

        It can be evicted once it was held and is held no more.
        """
        size = self.page_size
        node = Node(
            parent.namespace,
            parent,
            parent.end,
            tuple(token_ids[:size]),
            token_ids[size:],
            page_ids,
            page_names(parent.chain_end(), token_ids, size),
            now,
            is_tail=len(token_ids) < size,
        )
        if parent.children is None:
            parent.children = Children()
        parent.children.add(node.first_page, node)
        self.num_nodes += 1
        self.num_evictable_pages += len(page_ids)
        self._take_in(node, 0)
        self._drop_subsumed_by(parent, node.first_page)
        return node

    def extend(self, node: Node, token_ids: list[int], page_ids: list[int]) -> None:
        """Lengthen the edge of a held leaf by whole pages."""
        assert node.holds
        assert node.children is None
        first = len(node.page_ids)
        node.chain += page_names(node.chain_end(), token_ids, self.page_size)
        node.rest += token_ids
        node.page_ids += page_ids
        self._take_in(node, first)

    def _take_in(self, node: Node, first: int) -> None:
        new = node.page_ids[first:]
        self.pages.give_to_tree(new)
        self.num_pages += len(new)
        self._watcher.pages_added(node, first)

    # Holding

    def hold(self, node: Node) -> None:
        """Keep `node` and its ancestors. O(1) where the ancestors are held already."""
        self.num_holds += 1
        above: Node | None = node
        while above is not None:
            above.holds += 1
            if above.holds > 1:
                return
            self.num_evictable_pages -= len(above.page_ids)
            above = above.parent

    def unhold(self, node: Node) -> None:
        """Take back one hold; what nobody holds now may be evicted."""
        self.num_holds -= 1
        above: Node | None = node
        while above is not None:
            assert above.holds > 0, f"{above!r} is not held"
            above.holds -= 1
            if above.holds:
                break
            self.num_evictable_pages += len(above.page_ids)
            above = above.parent
        if node.is_evictable_leaf:
            self.queue.offer(node)
            if node.is_tail and self.is_subsumed(node):
                self.remove_last_pages(node, 1, Removal.SUBSUMED)
                return
        self.forget_if_idle(node)

    def num_unpinned_pages(self, node: Node) -> int:
        """How many pages a pin of `node` would add to the pinned ones."""
        num_pages = 0
        above: Node | None = node
        while above is not None and not above.pins:
            num_pages += len(above.page_ids)
            above = above.parent
        return num_pages

    def pin(self, node: Node) -> None:
        """Count `node` and its ancestors as pinned. It must be held besides."""
        above: Node | None = node
        while above is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.num_pinned_pages += len(above.page_ids)
            above = above.parent

    def unpin(self, node: Node) -> None:
        """Take back one pin."""
        above: Node | None = node
        while above is not None:
            assert above.pins > 0, f"{above!r} is not pinned"
            above.pins -= 1
            if above.pins:
                return
            self.num_pinned_pages -= len(above.page_ids)
            above = above.parent

    # Shrinking

    def evict(self, num_pages: int, removal: Removal) -> int:
        """Free up to `num_pages` unheld pages, from the end of the least recently used leaf on.

        O(log n) for each leaf, amortised, and O(1) for each page.
        """
        num_freed = 0
        while num_freed < num_pages:
            node = self.queue.oldest()
            if node is None:
                break
            num_here = min(num_pages - num_freed, len(node.page_ids))
            self.remove_last_pages(node, num_here, removal)
            num_freed += num_here
        return num_freed

    def drop_unheld(self, namespace: Namespace, removal: Removal) -> int:
        """Free all pages of `namespace` that nobody holds. O(its nodes)."""
        root = self.roots.get(namespace)
        unheld = [] if root is None else [n for n in self._below(root) if not n.holds]
        num_freed = 0
        for node in reversed(unheld):  # children before parents
            if node.parent is not None:
                num_freed += len(node.page_ids)
                self.remove_last_pages(node, len(node.page_ids), removal)
        return num_freed

    def remove_last_pages(self, node: Node, num_pages: int, removal: Removal) -> None:
        """Free the last pages of an unheld leaf; an edge without pages goes as well."""
        assert node.is_evictable_leaf, f"{node!r} must stay"
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        first = len(node.page_ids) - num_pages
        self._watcher.pages_leaving(node, first, removal)
        if first == 0:
            parent.children.remove(node.first_page)
            if not parent.children.by_key:
                parent.children = None
            node.version = -1
            node.parent = None
            self.queue.forget(node)
            self.num_nodes -= 1
        else:
            node.version += 1
        self.pages.take_from_tree(node.page_ids[first:])
        self.num_pages -= num_pages
        self.num_evictable_pages -= num_pages
        del node.page_ids[first:]
        del node.chain[first:]
        del node.rest[max(first - 1, 0) * self.page_size :]
        if first == 0:
            if parent.is_evictable_leaf:
                self.queue.offer(parent)
            self.forget_if_idle(parent)

    def forget_if_idle(self, node: Node) -> None:
        """Drop a root below which there is nothing and which nobody holds."""
        is_idle = node.children is None and not node.holds
        if is_idle and node.parent is None and node.is_attached:
            node.version = -1
            del self.roots[node.namespace]

    def is_subsumed(self, tail: Node) -> bool:
        """Whether a sibling begins with all tokens of `tail`."""
        parent = tail.parent
        assert parent is not None
        assert parent.children is not None
        tokens = tail.first_page
        # What begins with these tokens stands directly behind them in the order.
        following = parent.children.after(tokens)
        return following is not None and following[: len(tokens)] == tokens

    def has_beginning(self, parent: Node, tokens: PageKey) -> bool:
        """Whether a page or tail directly below `parent` begins with `tokens`."""
        if parent.children is None:
            return False
        following = parent.children.at_or_after(tokens)
        return following is not None and following[: len(tokens)] == tokens

    def _drop_subsumed_by(self, parent: Node, key: PageKey) -> None:
        """Remove the unheld tails of `parent` that are beginnings of `key`."""
        children = parent.children  # not empty: the edge under `key` is one
        assert children is not None
        if not children.num_tails:
            return
        for length in range(1, min(len(key), self.page_size)):
            tail = children.by_key.get(key[:length])
            if tail is not None and not tail.holds:
                self.remove_last_pages(tail, 1, Removal.SUBSUMED)

    # Checking

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        for root in list(self.roots.values()):
            yield from self._below(root)

    def _below(self, root: Node) -> Iterator[Node]:
        stack = [root]
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack.extend(node.children.by_key.values())
