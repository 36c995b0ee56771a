"""What a caller gets from the tree: a match, a lease on it, a pin, and the result of publishing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from palmette.radix_cache.errors import LeaseReleased
from palmette.radix_cache.node import Namespace, Node

if TYPE_CHECKING:
    from palmette.radix_cache.cache import RadixCache
    from palmette.radix_cache.tiers import Promise


@dataclass(frozen=True, slots=True)
class Tail:
    """The first `num_tokens` tokens of a page, to be copied before anything is written behind."""

    page_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Where in the tree a match was found, so that a lease need not look again."""

    cache: RadixCache
    key: list[int]
    node: Node | None  # the edge that the last whole page lies on; None: the namespace is empty
    version: int
    tail_node: Node | None  # the edge that the tail's page lies on
    tail_version: int
    time: int  # of the use; 0: none

    @property
    def is_current(self) -> bool:
        """Whether all pages found are certain to be where they were. A split does not matter."""
        node, tail_node = self.node, self.tail_node
        return (node is None or node.version == self.version) and (
            tail_node is None or tail_node.version == self.tail_version
        )


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a key, exact to the token.

    `page_ids` are whole pages, shared as they are; `tail` names a page whose first tokens are the
    next ones of the key. `num_tokens` counts both. Nothing is held: take a lease before anything
    else is allocated.
    """

    namespace: Namespace
    num_tokens: int
    page_ids: tuple[int, ...]
    tail: Tail | None
    found: Found = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Published:
    """The outcome of giving pages to the tree.

    `page_ids` is the complete block table for the whole pages: the tree's page where it had one
    already. `num_folded` pages of the caller were such duplicates and are free now. `tail` names
    the page in the tree with the last, partial tokens if there is one that was given now.
    """

    page_ids: tuple[int, ...]
    num_folded: int = 0
    tail: Tail | None = None


class Lease:
    """A hold on a cached prefix: its pages and all before them stay until `release`.

    Made by `RadixCache.lease`. A context manager; `release` works exactly once.
    """

    __slots__ = ("_cache", "_node", "_page_ids", "_tail", "_tail_node", "namespace")

    def __init__(
        self,
        cache: RadixCache,
        node: Node,
        page_ids: Sequence[int],
        tail_node: Node | None,
        tail: Tail | None,
    ) -> None:
        self.namespace = node.namespace
        self._cache = cache
        self._node: Node | None = node  # None: released
        self._page_ids = list(page_ids)
        self._tail_node = tail_node
        self._tail = tail

    @property
    def is_released(self) -> bool:
        return self._node is None

    @property
    def page_ids(self) -> tuple[int, ...]:
        """The whole pages held, from the first token on."""
        return tuple(self._page_ids)

    @property
    def num_pages(self) -> int:
        """Whole pages held; a tail is not counted."""
        return len(self._page_ids)

    @property
    def tail(self) -> Tail | None:
        """The tail held besides, until `drop_tail`, or until there is more in its place."""
        return self._tail

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole pages and the tail held."""
        num_tokens = len(self._page_ids) * self._cache.page_size
        return num_tokens + (self._tail.num_tokens if self._tail else 0)

    def publish(
        self, token_ids: Sequence[int], page_ids: Sequence[int], tail: bool = False
    ) -> Published:
        """Give the whole pages that a sequence has computed to the tree, and hold them.

        `token_ids` are the computed tokens from the first one on, `page_ids` the block table for
        them, which begins with the pages held. Where the tree has a page already, the caller's is
        freed. With `tail`, the sequence is finished: the last partial page goes to the tree too, or
        is freed if the tree has its tokens, and so are pages beyond it; none of `page_ids` is the
        caller's afterwards. The tail given is held; one held before is dropped as soon as there is
        a new page in its place. O(new pages) beyond copying the block table.

        Raises PageNotOwned or ValueError, and then nothing has changed.
        """
        return self._cache.publish(self, token_ids, page_ids, tail)

    def append(self, token_ids: Sequence[int], page_ids: Sequence[int]) -> tuple[int, ...]:
        """As `publish` of whole pages, given only what is new behind the pages held.

        Returns the pages that are held in their places now: the tree's where it had them, and then
        the caller's are free. O(new pages), however long the sequence is.

        Raises PageNotOwned or ValueError, and then nothing has changed.
        """
        return self._cache.append(self, token_ids, page_ids)

    def advance(self, token_ids: Sequence[int]) -> int:
        """Hold what the tree has by now behind the whole pages held; returns how many tokens more.

        `token_ids` from the first one on; they begin with those of the whole pages held. For a
        sequence that waits while another computes the same prompt. Where they go on otherwise than
        the tail held does, or end within it, the rest of that tail is held no more: what is
        returned is negative then. O(tokens behind the pages held).
        """
        return self._cache.advance(self, token_ids)

    def promise(self, token_ids: Sequence[int]) -> Promise:
        """The tier's slots for the pages of `token_ids` behind the whole pages held, as far as it
        has them; they keep their contents until the promise is settled.

        Whoever copies them into pages of its own may publish these as if it had computed them.
        The tokens of a tail held are in the first of them as well. O(pages promised).
        """
        return self._cache.promise(self, token_ids)

    def peek(self, token_ids: Sequence[int]) -> Match:
        """As `RadixCache.peek`, but looks only at what is behind the pages held.

        `token_ids` from the first one on; they begin with those of the pages held. O(tokens behind
        the pages held), beyond copying the list of pages.
        """
        return self._cache.peek_behind(self, token_ids)

    def copy(self) -> Lease:
        """Another lease on the same pages and tail, as a fork needs. O(1) but for the page list."""
        node = self.node("copy")
        self._cache.tree.hold(node)
        if self._tail_node is not None:
            self._cache.tree.hold(self._tail_node)
        return Lease(self._cache, node, self._page_ids, self._tail_node, self._tail)

    def drop_tail(self) -> None:
        """Hold the whole pages only: the tail's tokens were copied, or are not wanted."""
        self.node("drop_tail")
        self._unhold_tail()
        self._cache.deliver_events()

    def release(self) -> None:
        """Hold nothing more; what was held counts as used until now.

        Raises LeaseReleased the second time.
        """
        node = self.node("release")
        node.touch(self._cache.next_use())
        self._unhold_tail()
        self._node = None
        self._cache.tree.unhold(node)
        self._cache.deliver_events()

    def set_logprobs(self, first_token: int, logprobs: Sequence[float]) -> None:
        """Keep log P(token | all before it) beside the pages, for tokens from `first_token` on.

        They must lie in the pages held, the tail's tokens included. They go with their page.
        """
        self.node("set_logprobs")
        self._cache.set_logprobs(self, first_token, logprobs)

    def logprobs(self) -> list[float | None]:
        """What is known of each of the `num_tokens` tokens held; None where nothing is."""
        self.node("logprobs")
        return self._cache.logprobs(self)

    # For the cache.

    def node(self, act: str) -> Node:
        """Where the whole pages held end."""
        if self._node is None:
            raise LeaseReleased(act)
        return self._node

    def held_nodes(self) -> tuple[Node, ...]:
        """Where its holds are: the end of the whole pages, and the tail."""
        node = self.node("look at")
        return (node,) if self._tail_node is None else (node, self._tail_node)

    def page_ids_from(self, first: int) -> tuple[int, ...]:
        """The whole pages held, from number `first` on."""
        return tuple(self._page_ids[first:])

    @property
    def last_page_id(self) -> int:
        return self._page_ids[-1]

    def lowest_node(self) -> Node:
        """What is held last: the tail if there is one."""
        return self._tail_node or self.node("pin")

    def move(self, node: Node, new_page_ids: Sequence[int]) -> None:
        """Hold up to `node`, which lies `new_page_ids` further on.

        A tail held lies behind by then: its tokens are in the first new page too.
        """
        old = self.node("publish")
        self._page_ids += new_page_ids
        if new_page_ids:
            self._unhold_tail()
        if node is not old:
            self._node = node
            self._cache.tree.hold(node)
            self._cache.tree.unhold(old)

    def hold_tail(self, node: Node, tail: Tail) -> None:
        """Hold a tail in place of the one held now."""
        self._cache.tree.hold(node)
        self._unhold_tail()
        self._tail_node, self._tail = node, tail

    def _unhold_tail(self) -> None:
        if self._tail_node is not None:
            tail_node, self._tail_node, self._tail = self._tail_node, None, None
            self._cache.tree.unhold(tail_node)

    def __enter__(self) -> Lease:
        self.node("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_released:
            self.release()


class Pin:
    """A lease that counts against the budget of pinned pages. `release` works exactly once."""

    __slots__ = ("_cache", "_lease", "_node")

    def __init__(self, cache: RadixCache, lease: Lease, node: Node) -> None:
        self._cache = cache
        self._lease = lease
        self._node = node

    @property
    def lease(self) -> Lease:
        """What is held; read it, and leave its release to the pin."""
        return self._lease

    @property
    def num_tokens(self) -> int:
        return self._lease.num_tokens

    @property
    def is_released(self) -> bool:
        return self._lease.is_released

    def release(self) -> None:
        """Unpin; the pages stay until they are evicted. Raises LeaseReleased the second time."""
        if self._lease.is_released:
            raise LeaseReleased("unpin")
        self._cache.tree.unpin(self._node)
        self._lease.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_released:
            self.release()
