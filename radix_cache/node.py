"""One edge of the prefix tree, and the index of the edges below it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from palmette.radix_cache.names import Name, root_name

PageKey = tuple[int, ...]  # the tokens of one page, or of one partial tail

# A block of the ordered index is cut in two beyond this. Larger blocks make an insertion move
# more memory, smaller ones lengthen the list of blocks; flat between 128 and 2,048.
_MAX_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal, besides the token ids, for keys and values to be shared.

    The fields stay apart and are never joined as text, so that no salt can spell an adapter.
    `adapter` should name loaded weights, not a file or tenant: a reload is a new identity.
    `media` lists content hashes (wide ones, with the preprocessing options in them) of pictures
    or sounds behind placeholder tokens.
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""
    media: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model", "adapter", "salt"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.media, tuple) or not all(isinstance(m, str) for m in self.media):
            raise TypeError(f"media must be a tuple of strings, got {self.media!r}")


class Children:
    """The edges below a node by their first page, and those pages in lexicographic order.

    The order answers which child shares most tokens with a key that no child matches in full: the
    longest common prefix with a sorted list is next to the key's place in it. The list is kept in
    blocks, so that thousands of children cost an insertion no more than a block's move.
    """

    __slots__ = ("_blocks", "_lasts", "by_key", "num_tails")

    def __init__(self) -> None:
        self.by_key: dict[PageKey, Node] = {}
        self.num_tails = 0
        self._blocks: list[list[PageKey]] = []
        self._lasts: list[PageKey] = []  # the last key of each block

    def add(self, key: PageKey, node: Node) -> None:
        """Put `node` under a key that is not taken."""
        assert key not in self.by_key
        self.by_key[key] = node
        self.num_tails += node.is_tail
        if not self._blocks:
            self._blocks.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        block = self._blocks[at]
        insort(block, key)
        if len(block) > _MAX_BLOCK:
            middle = len(block) // 2
            self._blocks.insert(at + 1, block[middle:])
            self._lasts.insert(at + 1, block[-1])
            del block[middle:]
        self._lasts[at] = block[-1]

    def replace(self, key: PageKey, node: Node) -> None:
        """Put `node` in the place of the edge under `key`; both are whole pages."""
        self.by_key[key] = node

    def remove(self, key: PageKey) -> None:
        """Forget the edge under `key`."""
        self.num_tails -= self.by_key.pop(key).is_tail
        at = bisect_left(self._lasts, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at]
            del self._lasts[at]

    def before(self, key: PageKey) -> PageKey | None:
        """The greatest first page smaller than `key`."""
        at = bisect_left(self._lasts, key)
        if at < len(self._blocks):
            place = bisect_left(self._blocks[at], key)
            if place:
                return self._blocks[at][place - 1]
        return self._lasts[at - 1] if at else None

    def at_or_after(self, key: PageKey) -> PageKey | None:
        """The smallest first page not smaller than `key`."""
        at = bisect_left(self._lasts, key)
        if at == len(self._blocks):
            return None
        block = self._blocks[at]
        return block[bisect_left(block, key)]

    def after(self, key: PageKey) -> PageKey | None:
        """The smallest first page greater than `key`."""
        at = bisect_right(self._lasts, key)
        if at == len(self._blocks):
            return None
        block = self._blocks[at]
        return block[bisect_right(block, key)]

    def ordered(self) -> Iterator[PageKey]:
        """Every first page, in order."""
        for block in self._blocks:
            yield from block

    def is_sound(self) -> bool:
        """Whether the blocks are what `before` and its like rely on. For checks."""
        sizes = [len(block) for block in self._blocks]
        return self._lasts == [block[-1] for block in self._blocks if block] and all(
            0 < size <= _MAX_BLOCK for size in sizes
        )


class Node:
    """An edge of whole pages and the point at its end; or a tail: one page that is not full.

    A tail has no children. A root has no pages. The edge covers the pages [start, end) of every
    prefix that runs through it. `holds` counts the leases that end here plus the children that are
    held: a node is held if and only if one below it is, so the first hold of a path marks its
    ancestors and later ones stop where the path is marked already. `pins` is the same for pins.
    """

    __slots__ = (
        "chain",
        "children",
        "first_page",
        "holds",
        "is_tail",
        "last_access",
        "namespace",
        "page_ids",
        "parent",
        "pins",
        "queued_at",
        "rest",
        "start",
        "ticket",
        "version",
        "whole_access",
    )

    def __init__(
        self,
        namespace: Namespace,
        parent: Node | None,
        start: int,
        first_page: PageKey,
        rest: list[int],
        page_ids: list[int],
        chain: list[Name],
        last_access: int,
        *,
        is_tail: bool = False,
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.start = start  # in pages
        # The tokens in two parts: what the parent knows the edge by, which a look-up has compared
        # already, and the others. Lists, so that a growing edge costs only what is new.
        self.first_page = first_page
        self.rest = rest
        self.page_ids = page_ids
        self.chain = chain  # chain[i] names the whole prefix up to and including page i
        self.children: Children | None = None  # None where there are none
        self.is_tail = is_tail
        self.holds = 0
        self.pins = 0
        self.last_access = last_access  # of any part of the edge
        self.whole_access = last_access  # of its end
        self.version = 0  # moves on when pages leave the edge; negative: out of the tree
        self.ticket = 0  # of the node's entry in the eviction queue; 0: none
        self.queued_at = 0  # the last access that entry was made for

    def touch(self, now: int) -> None:
        """All of the edge is used now."""
        self.last_access = self.whole_access = now

    @property
    def end(self) -> int:
        """In pages."""
        return self.start + len(self.page_ids)

    @property
    def is_attached(self) -> bool:
        return self.version >= 0

    @property
    def is_evictable_leaf(self) -> bool:
        return (
            not self.holds
            and self.children is None
            and self.version >= 0
            and self.parent is not None
        )

    def token_ids_from(self, page: int, page_size: int) -> tuple[int, ...]:
        """The tokens of the pages from the edge's own number `page` on."""
        if page:
            return tuple(self.rest[(page - 1) * page_size :])
        return (*self.first_page, *self.rest)

    def name_before(self, page: int) -> Name:
        """The name of the prefix that the edge's own page number `page` follows."""
        if page:
            return self.chain[page - 1]
        return root_name(self.namespace) if self.parent is None else self.parent.chain_end()

    def chain_end(self) -> Name:
        """The name of the whole prefix that ends with this node."""
        return self.chain[-1] if self.chain else root_name(self.namespace)

    def __repr__(self) -> str:
        kind = "tail" if self.is_tail else "root" if self.parent is None else "edge"
        return f"<{kind} pages [{self.start}, {self.end}) held {self.holds}x>"


_Tokens = TypeVar("_Tokens", list[int], tuple[int, ...])


def common_prefix_length(
    one: _Tokens, other: _Tokens, known: int = 0, limit: int | None = None
) -> int:
    """How many leading tokens are the same, `limit` at most; the first `known` are.

    By bisection with slices, so that the comparing happens in C: O(n), about 2n tokens.
    """
    high = min(len(one), len(other))
    if limit is not None:
        high = min(high, limit)
    low = known  # equal up to here, and not beyond `high`
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
