"""The prefix cache: which token prefixes are in which pages, and who may still read them."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from operator import index

from palmette.radix_cache.errors import PinBudgetExceeded, StaleMatch
from palmette.radix_cache.events import (
    CacheStats,
    Observer,
    PagesEvicted,
    PagesInserted,
    PrefixHit,
)
from palmette.radix_cache.history import Departure, Explanation, History, Reason, Stretch
from palmette.radix_cache.lease import Found, Lease, Match, Pin, Published, Tail
from palmette.radix_cache.names import Name, page_name, root_name
from palmette.radix_cache.node import Namespace, Node
from palmette.radix_cache.pages import PagePool
from palmette.radix_cache.tiers import Promise, Tier
from palmette.radix_cache.tree import Removal, Tree, Walk

_log = logging.getLogger(__name__)

_DEFAULT_NAMESPACE = Namespace()

# `explain` looks for a key in at most this many other namespaces; salts may be many.
_MAX_NAMESPACES_EXPLAINED = 256


class RadixCache:
    """Token prefixes in pages of `page_size` tokens, matched exactly to the token.

    Uses are ordered as they come; `clock` tells when evictions happened, by default in numbers of
    uses. At most `max_pinned_pages` are pinned at a time: half of the pool by default, so that
    pins never stop the rest. The last `num_remembered` evicted pages are remembered for `explain`,
    at about a kilobyte each. With a `tier`, whole pages that are evicted go there and can come back
    (see `Lease.promise`). Not for several threads at a time.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        clock: Callable[[], float] | None = None,
        *,
        max_pinned_pages: int | None = None,
        num_remembered: int = 4096,
        observers: Iterable[Observer] = (),
        tier: Tier | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if max_pinned_pages is None:
            max_pinned_pages = num_pages // 2
        if not 0 <= max_pinned_pages <= num_pages:
            raise ValueError(
                f"max_pinned_pages must be between 0 and {num_pages}, got {max_pinned_pages}"
            )
        self.page_size = page_size
        self.max_pinned_pages = max_pinned_pages
        self.pages = PagePool(num_pages)
        self.tier = tier
        self.stats = CacheStats()
        self.history = History(num_remembered)
        self.tree = Tree(self.pages, page_size, self)
        self._clock = clock
        self._num_uses = 0  # orders the uses; exact where a clock has ticks
        self._logprobs: dict[int, array[float]] = {}  # by page; NaN where nothing is known
        self._observers = list(observers)
        self._events: list[PagesInserted | PagesEvicted | PrefixHit] = []
        self._departure = Departure(0.0, Removal.EVICTED, None)  # of the eviction under way

    # Pages

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could give now: free ones and those that nobody holds."""
        return self.pages.num_free + self.tree.num_evictable_pages

    @property
    def num_cached_pages(self) -> int:
        return self.tree.num_pages

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no lease or pin holds."""
        return self.tree.num_evictable_pages

    @property
    def num_pinned_pages(self) -> int:
        return self.tree.num_pinned_pages

    def allocate(self, num_pages: int, *, by: str | None = None) -> list[int] | None:
        """That many pages for the caller to own, or None and nothing changed.

        Evicts what was used least recently if too few are free. `by` names who needed them.
        """
        num_missing = num_pages - self.pages.num_free
        if num_missing > 0:
            if num_missing > self.tree.num_evictable_pages:
                return None
            self._evict(num_missing, by)
        page_ids = self.pages.allocate(num_pages)
        self.deliver_events()
        return page_ids

    def evict(self, num_pages: int, *, by: str | None = None) -> int:
        """Free up to `num_pages` pages that nobody holds, least recently used first.

        Goes page by page from the end of a leaf; returns how many were freed.
        """
        num_freed = self._evict(num_pages, by)
        self.deliver_events()
        return num_freed

    def flush(self, namespace: Namespace | None = None, *, by: str | None = None) -> int:
        """Drop all that nobody holds, of one namespace or of every; returns how many pages.

        What the tier keeps of it is dropped as well.
        """
        self._departure = Departure(self._time(), Removal.FLUSHED, by)
        if namespace is None:
            num_freed = self.tree.evict(self.tree.num_evictable_pages, Removal.FLUSHED)
        else:
            num_freed = self.tree.drop_unheld(namespace, Removal.FLUSHED)
        if self.tier is not None:
            self.history.left_tier(self.tier.flush(namespace), self._departure)
        self.deliver_events()
        return num_freed

    def _evict(self, num_pages: int, by: str | None) -> int:
        self._departure = Departure(self._time(), Removal.EVICTED, by)
        if self.tier is None:
            return self.tree.evict(num_pages, Removal.EVICTED)
        try:
            num_freed = self.tree.evict(num_pages, Removal.EVICTED)
            self.tier.carry_out()
        finally:
            self.tier.drop_moves()  # of what was copied, nothing is left
        return num_freed

    def _time(self) -> float:
        return self._num_uses if self._clock is None else self._clock()

    # Matching and holding

    def match(self, token_ids: Sequence[int], namespace: Namespace = _DEFAULT_NAMESPACE) -> Match:
        """The longest cached prefix of `token_ids`, which counts as used now. Holds nothing."""
        self.stats.num_matches += 1
        return self._match(list(token_ids), namespace, self.next_use())

    def peek(self, token_ids: Sequence[int], namespace: Namespace = _DEFAULT_NAMESPACE) -> Match:
        """As `match`, without counting as a use: for who only wants to know."""
        return self._match(list(token_ids), namespace, None)

    def peek_behind(self, lease: Lease, token_ids: Sequence[int]) -> Match:
        """See `Lease.peek`."""
        node = lease.node("peek")
        num_held = lease.num_pages
        if len(token_ids) < num_held * self.page_size:
            raise ValueError(f"{len(token_ids)} tokens given, the lease holds {num_held} pages")
        key = list(token_ids)
        behind = self._match_below(node, key[num_held * self.page_size :], None)
        return replace(
            behind,
            num_tokens=num_held * self.page_size + behind.num_tokens,
            page_ids=lease.page_ids + behind.page_ids,
            found=replace(behind.found, key=key),
        )

    def lease(self, match: Match, *, counted: bool = True) -> Lease:
        """Hold what was matched. An empty match is fine: its lease can publish.

        `counted=False` keeps it out of the hit rate: a sequence that resumes is no new lookup.
        Raises StaleMatch if some of the pages were evicted since, ValueError if another cache made
        the match.
        """
        found = self._current(match)
        root = self.tree.root(match.namespace)
        node, tail_node = self._cut_out(found, root, len(match.page_ids))
        self.tree.hold(node)
        if tail_node is not None:
            self.tree.hold(tail_node)
        if counted:
            self._count_hit(match, len(found.key))
        lease = Lease(self, node, match.page_ids, tail_node, match.tail)
        self.deliver_events()
        return lease

    def match_and_lease(
        self,
        token_ids: Sequence[int],
        namespace: Namespace = _DEFAULT_NAMESPACE,
        *,
        counted: bool = True,
    ) -> Lease:
        """Hold the longest cached prefix of `token_ids`."""
        return self.lease(self.match(token_ids, namespace), counted=counted)

    def pin(self, match: Match) -> Pin:
        """Keep what was matched in the tree until the pin is released, within the budget.

        Raises PinBudgetExceeded, or StaleMatch as `lease` does.
        """
        lease = self.lease(match, counted=False)
        node = lease.lowest_node()
        num_needed = self.tree.num_unpinned_pages(node)
        num_left = self.max_pinned_pages - self.tree.num_pinned_pages
        if num_needed > num_left:
            lease.release()
            raise PinBudgetExceeded(num_needed, num_left)
        self.tree.pin(node)
        return Pin(self, lease, node)

    def advance(self, lease: Lease, token_ids: Sequence[int]) -> int:
        """See `Lease.advance`."""
        node = lease.node("advance")
        num_held = lease.num_pages
        num_before = lease.num_tokens
        if len(token_ids) < num_held * self.page_size:
            raise ValueError(f"{len(token_ids)} tokens given, the lease holds {num_held} pages")
        key = list(token_ids[num_held * self.page_size :])
        match = self._match_below(node, key, self.next_use())
        end, tail_node = self._cut_out(match.found, node, num_held + len(match.page_ids))
        lease.move(end, match.page_ids)
        if tail_node is not None and match.tail is not None:
            lease.hold_tail(tail_node, match.tail)
        else:  # the one held, if any, was of other tokens
            lease.drop_tail()
        self.deliver_events()
        return lease.num_tokens - num_before

    def _match(self, key: list[int], namespace: Namespace, now: int | None) -> Match:
        root = self.tree.roots.get(namespace)
        if root is None:
            return Match(namespace, 0, (), None, Found(self, key, None, 0, None, 0, 0))
        return self._match_below(root, key, now)

    def _match_below(self, start: Node, key: list[int], now: int | None) -> Match:
        """What follows the end of `start`. With `now`, it counts as used then."""
        walk = self.tree.walk(start, key)
        tail_node = walk.tail_node
        if now is not None:
            # The edges before these need no touch: one becomes a leaf when the last edge behind it
            # was the oldest leaf of all, and is then rightly the next to go.
            walk.node.last_access = now
            if walk.num_pages == len(walk.node.page_ids):
                walk.node.whole_access = now
            if tail_node is not None:
                tail_node.last_access = now
        tail = None
        if tail_node is not None:
            tail = Tail(tail_node.page_ids[walk.tail_index], walk.num_tail_tokens)
        found = Found(
            self,
            key,
            walk.node,
            walk.node.version,
            tail_node,
            tail_node.version if tail_node is not None else 0,
            now or 0,
        )
        num_tokens = len(walk.page_ids) * self.page_size + walk.num_tail_tokens
        return Match(walk.node.namespace, num_tokens, tuple(walk.page_ids), tail, found)

    def _cut_out(self, found: Found, start: Node, num_pages: int) -> tuple[Node, Node | None]:
        """Split so that the first `num_pages` pages end with a node, and a tail page is one.

        `found` was looked up from the end of `start`.
        """
        node = start if num_pages == start.end else _node_at(found.node, num_pages - 1)
        if num_pages < node.end:
            node = self.tree.split(node, num_pages - node.start)
        tail_node = None
        if found.tail_node is not None:
            tail_node = _node_at(found.tail_node, num_pages)
            if len(tail_node.page_ids) > 1:
                tail_node = self.tree.split(tail_node, 1)
            tail_node.touch(max(tail_node.last_access, found.time))
        return node, tail_node

    def _current(self, match: Match) -> Found:
        """Where the match's pages are now. Raises StaleMatch if they are not all there."""
        found = match.found
        if found.cache is not self:
            raise ValueError("the match is one of another cache")
        if found.is_current:
            return found
        again = self._match(found.key[: match.num_tokens], match.namespace, None)
        if again != match:
            raise StaleMatch(match.num_tokens)
        return replace(again.found, key=found.key)

    def _count_hit(self, match: Match, num_tokens: int) -> None:
        self.stats.num_leases += 1
        self.stats.num_lookup_tokens += num_tokens
        self.stats.num_hit_tokens += match.num_tokens
        if self._observers and match.num_tokens:
            self._events.append(
                PrefixHit(
                    namespace=match.namespace,
                    num_tokens=num_tokens,
                    num_cached_tokens=match.num_tokens,
                )
            )

    # The tier

    def num_tier_pages(self, match: Match) -> int:
        """How many whole pages of the key, behind those of the match, could come back from the
        tier. Asking counts as no use of them. Raises StaleMatch as `lease` does.
        """
        if self.tier is None or not self.tier.num_pages:
            return 0
        found = self._current(match)
        name = self._name(match, found)
        return len(self._tier_names(self.tier, found.key, len(match.page_ids), name))

    def promise(self, lease: Lease, token_ids: Sequence[int]) -> Promise:
        """See `Lease.promise`."""
        node = lease.node("promise")
        num_held = lease.num_pages
        if len(token_ids) < num_held * self.page_size:
            raise ValueError(f"{len(token_ids)} tokens given, the lease holds {num_held} pages")
        if self.tier is None or not self.tier.num_pages:
            return Promise(None, (), ())
        names = self._tier_names(self.tier, token_ids, num_held, node.chain_end())
        return self.tier.promise(names)

    def _tier_names(self, tier: Tier, key: Sequence[int], num_pages: int, name: Name) -> list[Name]:
        """Of the whole pages of `key` that the tier has behind `num_pages` pages named `name`."""
        size = self.page_size
        names: list[Name] = []
        for start in range(num_pages * size, len(key) - size + 1, size):
            following = _page_name(name, key[start : start + size])
            if following is None or following not in tier:
                break
            names.append(following)
            name = following
        return names

    def _name(self, match: Match, found: Found) -> Name:
        """Of the whole pages of a match."""
        num_pages = len(match.page_ids)
        if not num_pages:
            return root_name(match.namespace)
        node = _node_at(found.node, num_pages - 1)
        return node.chain[num_pages - 1 - node.start]

    # Inserting

    def insert(
        self,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        namespace: Namespace = _DEFAULT_NAMESPACE,
    ) -> Published:
        """Give the pages of `token_ids` to the tree, a partial last one included.

        The caller owns none of `page_ids` afterwards; those of a matched prefix may be among them,
        in their place. Raises PageNotOwned or ValueError, and then nothing has changed.
        """
        root = self._match([], namespace, None)
        with self.lease(root, counted=False) as lease:
            return self.publish(lease, token_ids, page_ids, True)

    def publish(
        self, lease: Lease, token_ids: Sequence[int], page_ids: Sequence[int], tail: bool = False
    ) -> Published:
        """See `Lease.publish`."""
        size = self.page_size
        node = lease.node("publish")
        num_held = lease.num_pages
        num_whole, num_rest = divmod(len(token_ids), size)
        num_needed = num_whole + 1 if tail and num_rest else num_whole
        self._check_block_table(lease, len(token_ids), page_ids, num_needed)
        cut = num_whole * size
        new_token_ids = _as_token_ids(token_ids[num_held * size : cut])
        rest = _as_token_ids(token_ids[cut:]) if tail else []
        new_page_ids = list(page_ids[num_held:num_whole])
        rest_page_ids = list(page_ids[num_whole:]) if tail else []

        now = self.next_use()
        num_folded = self._give_pages(lease, node, new_token_ids, new_page_ids, rest_page_ids, now)
        published_tail = self._give_tail(lease, lease.node("publish"), rest, rest_page_ids, now)
        self.deliver_events()
        return Published(lease.page_ids, num_folded, published_tail)

    def append(
        self, lease: Lease, token_ids: Sequence[int], page_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """See `Lease.append`."""
        node = lease.node("append")
        if len(token_ids) != len(page_ids) * self.page_size:
            raise ValueError(
                f"{len(token_ids)} tokens given for {len(page_ids)} pages of {self.page_size}"
            )
        num_held = lease.num_pages
        new_page_ids = list(page_ids)
        self._give_pages(lease, node, _as_token_ids(token_ids), new_page_ids, [], self.next_use())
        self.deliver_events()
        return lease.page_ids_from(num_held)

    def _give_pages(
        self,
        lease: Lease,
        node: Node,
        token_ids: list[int],
        page_ids: list[int],
        other_page_ids: list[int],
        now: int,
    ) -> int:
        """Give whole pages behind the end of `lease`, which is `node`, to the tree, and hold them;
        how many of them it had already. `other_page_ids` must be the caller's own as well.
        """
        walk = self.tree.walk(node, token_ids)
        num_found = len(walk.page_ids)
        duplicates = [
            mine for mine, theirs in zip(page_ids, walk.page_ids, strict=False) if mine != theirs
        ]
        missing = page_ids[num_found:] if num_found else page_ids
        self.pages.check_owned(duplicates + missing + other_page_ids)
        # Nothing was changed up to here, and from here on nothing fails.
        end = self._grow(lease, walk, token_ids, missing, now)
        lease.move(end, walk.page_ids + missing)
        if duplicates:
            self.pages.free(duplicates)
            self.stats.num_folded_pages += len(duplicates)
        return len(duplicates)

    def _check_block_table(
        self, lease: Lease, num_tokens: int, page_ids: Sequence[int], num_needed: int
    ) -> None:
        num_held = lease.num_pages
        if num_tokens < num_held * self.page_size:
            raise ValueError(
                f"{num_tokens} tokens given, the lease holds {num_held} pages "
                f"of {self.page_size} tokens already"
            )
        if len(page_ids) < num_needed:
            raise ValueError(f"{num_tokens} tokens need {num_needed} pages, got {len(page_ids)}")
        if num_held and page_ids[num_held - 1] != lease.last_page_id:
            raise ValueError(
                f"the block table has page {page_ids[num_held - 1]} at place {num_held - 1}, the "
                f"lease holds page {lease.last_page_id} there: take over Published.page_ids"
            )

    def _grow(
        self, lease: Lease, walk: Walk, token_ids: list[int], missing: list[int], now: int
    ) -> Node:
        """Put the pages that the walk did not find in the tree; returns where they end.

        An edge that only this lease holds, and at the end, is lengthened: a sequence that runs
        alone leaves one edge behind, not one for each page.
        """
        end = walk.node
        if walk.num_pages < len(end.page_ids):
            end = self.tree.split(end, walk.num_pages)
        if not missing:
            return end
        new_token_ids = token_ids[len(walk.page_ids) * self.page_size :]
        is_mine = end is lease.node("publish") and end.holds == 1
        if is_mine and end.parent is not None and end.children is None:
            self.tree.extend(end, new_token_ids, missing)
            return end
        return self.tree.attach(end, new_token_ids, missing, now)

    def _give_tail(
        self, lease: Lease, end: Node, rest: list[int], page_ids: list[int], now: int
    ) -> Tail | None:
        """The last tokens, which fill no page, join the tree unless it has them."""
        if not rest or self.tree.has_beginning(end, tuple(rest)):
            self.pages.free(page_ids)
            self.stats.num_folded_pages += bool(rest)
            return None
        self.pages.free(page_ids[1:])
        tail = Tail(page_ids[0], len(rest))
        lease.hold_tail(self.tree.attach(end, rest, page_ids[:1], now), tail)
        return tail

    # Log-probabilities

    def set_logprobs(self, lease: Lease, first_token: int, logprobs: Sequence[float]) -> None:
        """See `Lease.set_logprobs`."""
        num_tokens = lease.num_tokens
        if not 0 <= first_token <= first_token + len(logprobs) <= num_tokens:
            raise ValueError(
                f"log-probabilities for tokens {first_token} to "
                f"{first_token + len(logprobs) - 1}, the lease holds {num_tokens} tokens"
            )
        size = self.page_size
        page_ids = lease.page_ids + ((lease.tail.page_id,) if lease.tail else ())
        for place, logprob in enumerate(logprobs, first_token):
            page_id = page_ids[place // size]
            kept = self._logprobs.get(page_id)
            if kept is None:
                kept = self._logprobs[page_id] = array("d", [math.nan]) * size
            kept[place % size] = logprob

    def logprobs(self, held: Lease | Match) -> list[float | None]:
        """What is known of log P(token | all before it) for each token of a match or lease."""
        size = self.page_size
        known: list[float | None] = []
        counts = [(page_id, size) for page_id in held.page_ids]
        if held.tail is not None:
            counts.append((held.tail.page_id, held.tail.num_tokens))
        for page_id, num_tokens in counts:
            kept = self._logprobs.get(page_id)
            if kept is None:
                known += [None] * num_tokens
            else:
                known += [None if math.isnan(x) else x for x in kept[:num_tokens]]
        return known

    def _hand_over_logprobs(self, tail: Node) -> None:
        """What is known of a tail's tokens goes to the page that begins with them."""
        known = self._logprobs.get(tail.page_ids[0])
        parent = tail.parent
        if known is None or parent is None or parent.children is None:
            return
        key = parent.children.after(tail.first_page)
        assert key is not None
        page_id = parent.children.by_key[key].page_ids[0]
        kept = self._logprobs.get(page_id)
        if kept is None:
            kept = self._logprobs[page_id] = array("d", [math.nan]) * self.page_size
        for place, logprob in enumerate(known[: len(tail.first_page)]):
            if math.isnan(kept[place]):
                kept[place] = logprob

    @property
    def num_pages_with_logprobs(self) -> int:
        return len(self._logprobs)

    def pages_with_logprobs(self) -> list[int]:
        """Pages beside which log-probabilities are kept."""
        return list(self._logprobs)

    # Explaining

    def explain(
        self, token_ids: Sequence[int], namespace: Namespace = _DEFAULT_NAMESPACE
    ) -> Explanation:
        """How many of the tokens are cached, and why the others are not. Touches nothing.

        It may name another namespace, its salt included: for operators, not for tenants. At most
        256 other namespaces are looked at.
        """
        key = list(token_ids)
        match = self._match(key, namespace, None)
        stretches = [Stretch(start=0, end=match.num_tokens, reason=Reason.CACHED)]
        stretches += self._stretches_behind(key, match)
        start = stretches[-1].end
        other = self._best_other_namespace(key, namespace, start)
        if other is not None:
            stretches.append(other)
            start = other.end
        if start < len(key):
            diverged = start == match.num_tokens and self._goes_on_otherwise(match)
            reason = Reason.DIVERGED if diverged else Reason.NEVER_SEEN
            stretches.append(Stretch(start=start, end=len(key), reason=reason))
        kept = tuple(s for s in stretches if s.end > s.start)
        return Explanation(len(key), match.num_tokens, kept)

    def _stretches_behind(self, key: list[int], match: Match) -> list[Stretch]:
        """What follows the cached tokens and is in the tier, and then what is remembered as having
        left the tree.
        """
        name = self._name(match, match.found)
        start, num_pages = match.num_tokens, len(match.page_ids)
        stretches = []
        if self.tier is not None:
            names = self._tier_names(self.tier, key, num_pages, name)
            if names:
                name = names[-1]
                num_pages += len(names)
                end = num_pages * self.page_size
                stretches.append(Stretch(start=start, end=end, reason=Reason.IN_TIER))
                start = end
        return stretches + self._evicted_stretches(key, start, num_pages, name)

    def _evicted_stretches(
        self, key: list[int], start: int, num_pages: int, name: Name
    ) -> list[Stretch]:
        """What is remembered from token `start` on, behind `num_pages` pages named `name`."""
        size = self.page_size
        boundary = num_pages * size
        stretches: list[Stretch] = []
        while boundary < len(key):
            page = key[boundary : boundary + size]
            length, departure = self.history.departure_after(name, _page_name(name, page), page)
            if departure is None or boundary + length <= start:
                break
            end = boundary + length
            if stretches and stretches[-1].departure == departure:
                start = stretches.pop().start
            stretches.append(
                Stretch(start=start, end=end, reason=Reason.EVICTED, departure=departure)
            )
            name = page_name(name, key[boundary:end])
            start = boundary = end
            if length < size:
                break
        return stretches

    def _best_other_namespace(
        self, key: list[int], namespace: Namespace, start: int
    ) -> Stretch | None:
        best = None
        end = start
        others = (n for n in self.tree.roots if n != namespace)
        for other in islice(others, _MAX_NAMESPACES_EXPLAINED):
            match = self._match(key, other, None)
            if match.num_tokens > end:
                best, end = other, match.num_tokens
        if best is None:
            return None
        return Stretch(start=start, end=end, reason=Reason.OTHER_NAMESPACE, namespace=best)

    def _goes_on_otherwise(self, match: Match) -> bool:
        """Whether the tree holds other tokens in the place where the match ends."""
        node, tail_node = match.found.node, match.found.tail_node
        if node is None or not match.num_tokens:
            return False
        if tail_node is not None and match.tail is not None:
            # A page that goes on behind a used up tail would have been found in its place.
            return match.tail.num_tokens < len(tail_node.first_page)
        return node.children is not None or node.end > len(match.page_ids)

    # Observers

    def add_observer(self, observer: Observer) -> None:
        """Tell `observer` of every change from now on."""
        self._observers.append(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Tell `observer` nothing more. Raises ValueError if it was not told anything."""
        self._observers.remove(observer)

    def next_use(self) -> int:
        """The place of a use in the order of all uses."""
        self._num_uses += 1
        return self._num_uses

    def deliver_events(self) -> None:
        """Tell the observers what happened since the last time."""
        while self._events:
            events, self._events = self._events, []
            for observer in list(self._observers):
                self._tell(observer, events)

    def _tell(
        self, observer: Observer, events: list[PagesInserted | PagesEvicted | PrefixHit]
    ) -> None:
        try:
            for event in events:
                if isinstance(event, PagesInserted):
                    observer.inserted(event)
                elif isinstance(event, PagesEvicted):
                    observer.evicted(event)
                else:
                    observer.hit(event)
        except Exception:
            _log.exception("%r raised and is told no more", observer)
            self._observers.remove(observer)

    # What the tree tells us

    def pages_added(self, node: Node, first: int) -> None:
        """See `tree.Watcher`."""
        self.stats.num_inserted_pages += len(node.page_ids) - first
        self.history.came(node, first)
        if self._observers:
            if first:
                parent_page_id: int | None = node.page_ids[first - 1]
            else:
                above = node.parent.page_ids if node.parent is not None else []
                parent_page_id = above[-1] if above else None
            self._events.append(
                PagesInserted(
                    namespace=node.namespace,
                    num_tokens_before=(node.start + first) * self.page_size,
                    parent_page_id=parent_page_id,
                    token_ids=node.token_ids_from(first, self.page_size),
                    page_ids=tuple(node.page_ids[first:]),
                )
            )

    def pages_leaving(self, node: Node, first: int, removal: Removal) -> None:
        """See `tree.Watcher`."""
        num_pages = len(node.page_ids) - first
        if removal is Removal.EVICTED:
            self.stats.num_evicted_pages += num_pages
        elif removal is Removal.FLUSHED:
            self.stats.num_flushed_pages += num_pages
        else:
            self.stats.num_subsumed_pages += num_pages
        if removal is not Removal.SUBSUMED:
            self.history.left(node, first, self.page_size, self._departure)
        if self.tier is not None and removal is Removal.EVICTED and not node.is_tail:
            self.tier.take(node.namespace, node.chain[first:], node.page_ids[first:])
        if self._logprobs:
            if removal is Removal.SUBSUMED:
                self._hand_over_logprobs(node)
            for page_id in node.page_ids[first:]:
                self._logprobs.pop(page_id, None)
        if self._observers:
            self._events.append(
                PagesEvicted(
                    namespace=node.namespace,
                    num_tokens_before=(node.start + first) * self.page_size,
                    token_ids=node.token_ids_from(first, self.page_size),
                    page_ids=tuple(node.page_ids[first:]),
                    removal=removal,
                    by=self._departure.by if removal is not Removal.SUBSUMED else None,
                )
            )


def _node_at(node: Node | None, place: int) -> Node:
    """The edge on the way down to `node` that has the page at `place`."""
    assert node is not None
    while node.start > place:
        assert node.parent is not None
        node = node.parent
    return node


def _page_name(before: Name, page: Sequence[int]) -> Name | None:
    """As `page_name`; None for tokens that no page can hold."""
    try:
        return page_name(before, page)
    except ValueError:
        return None


def _as_token_ids(token_ids: Sequence[int]) -> list[int]:
    """Plain integers. Raises TypeError for what is none, ValueError for more than 64 bits."""
    kept = [index(t) for t in token_ids]  # the caller's own objects, which compare at once
    try:
        array("q", kept)
    except OverflowError:
        raise ValueError("a token id takes more than 64 bits") from None
    return kept
