"""A plain model of the cache: for each page in the tree, the whole prefix up to its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from palmette.radix_cache import (
    Lease,
    LeaseReleased,
    Match,
    Namespace,
    PagesEvicted,
    PagesInserted,
    PageState,
    Pin,
    PinBudgetExceeded,
    PrefixHit,
    Promise,
    Published,
    RadixCache,
    Reason,
    StaleMatch,
    Tier,
    invariants,
)

Prefix = tuple[int, ...]


@dataclass
class Directory:
    """Pages and their prefixes, as an observer learns of them."""

    page_size: int
    prefixes: dict[int, tuple[Namespace, Prefix]] = field(default_factory=dict)

    def inserted(self, event: PagesInserted) -> None:
        prefix: Prefix = ()
        if event.parent_page_id is not None:
            namespace, prefix = self.prefixes[event.parent_page_id]
            assert namespace == event.namespace
        assert len(prefix) == event.num_tokens_before
        for place, page_id in enumerate(event.page_ids):
            prefix += event.token_ids[place * self.page_size :][: self.page_size]
            assert page_id not in self.prefixes
            self.prefixes[page_id] = (event.namespace, prefix)

    def evicted(self, event: PagesEvicted) -> None:
        for place, page_id in enumerate(event.page_ids):
            namespace, prefix = self.prefixes.pop(page_id)
            end = min((place + 1) * self.page_size, len(event.token_ids))
            assert namespace == event.namespace
            assert len(prefix) == event.num_tokens_before + end
            assert (
                event.token_ids[place * self.page_size : end]
                == (prefix[event.num_tokens_before + place * self.page_size :])
            )

    def hit(self, event: PrefixHit) -> None:
        assert 0 < event.num_cached_tokens <= event.num_tokens


@dataclass
class Running:
    """A sequence that computes `token_ids`; its block table is `lease.page_ids` + `own`."""

    token_ids: list[int]
    lease: Lease
    own: list[int]


class Model:
    """The cache beside a dictionary, driven by random operations and compared after each."""

    def __init__(
        self, seed: int, num_pages: int, page_size: int, num_tokens: int, num_slots: int
    ) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.num_tokens = num_tokens
        self.stored: dict[int, tuple[Namespace, Prefix]] = {}  # slot -> prefix up to its end
        self.promises: list[tuple[Promise, list[tuple[Namespace, Prefix]]]] = []
        tier = Tier(num_slots, self.store) if num_slots else None
        self.cache = RadixCache(num_pages, page_size, max_pinned_pages=num_pages // 3, tier=tier)
        self.directory = Directory(page_size)
        self.cache.add_observer(self.directory)
        self.tree: dict[int, tuple[Namespace, Prefix]] = {}  # page -> prefix up to its end
        self.logprobs: dict[int, dict[int, float]] = {}
        # All that was ever said of a token, by what it ends.
        self.said: dict[tuple[Namespace, Prefix], set[float]] = {}
        self.running: list[Running] = []
        self.pins: list[Pin] = []
        self.matches: list[Match] = []
        self.namespaces = [Namespace(), Namespace(salt="a"), Namespace(adapter="a")]

    def store(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages, which are not free for others yet, to slots, of which none is promised."""
        promised = {slot for promise, _ in self.promises for slot in promise.slots}
        assert len(set(slots)) == len(slots) == len(page_ids)
        for page_id, slot in zip(page_ids, slots, strict=True):
            namespace, prefix = self.tree[page_id]
            assert len(prefix) % self.page_size == 0
            assert slot not in promised
            self.stored[slot] = (namespace, prefix)

    # What the dictionary says

    def in_tier(self) -> set[tuple[Namespace, Prefix]]:
        tier = self.cache.tier
        if tier is None:
            return set()
        for slot, namespace in tier.slots().items():
            assert self.stored[slot][0] == namespace
        return {self.stored[slot] for slot in tier.slots()}

    def expected_promise(self, match: Match) -> list[tuple[Namespace, Prefix]]:
        """What the tier has of the match's key behind its whole pages."""
        key, size = tuple(match.found.key), self.page_size
        there = self.in_tier()
        expected = []
        for end in range((len(match.page_ids) + 1) * size, len(key) + 1, size):
            if (match.namespace, key[:end]) not in there:
                break
            expected.append((match.namespace, key[:end]))
        return expected

    def held(self) -> set[int]:
        held: set[int] = set()
        for lease in [r.lease for r in self.running] + [p.lease for p in self.pins]:
            held.update(lease.page_ids)
            if lease.tail:
                held.add(lease.tail.page_id)
        return held

    def owned(self) -> list[int]:
        return [page_id for running in self.running for page_id in running.own]

    def expected_match(
        self, key: list[int], namespace: Namespace
    ) -> tuple[list[int], int, set[int]]:
        """Whole pages, tokens of the best tail, and the pages that have it."""
        size = self.page_size
        by_prefix = {entry: page_id for page_id, entry in self.tree.items()}
        whole: list[int] = []
        while (len(whole) + 1) * size <= len(key):
            page = by_prefix.get((namespace, tuple(key[: (len(whole) + 1) * size])))
            if page is None:
                break
            whole.append(page)
        start = len(whole) * size
        best, pages = 0, set()
        for page_id, (other, prefix) in self.tree.items():
            if other != namespace or len(prefix) <= start or len(prefix) > start + size:
                continue
            if prefix[:start] != tuple(key[:start]):
                continue
            shared = 0
            while (
                start + shared < min(len(key), len(prefix))
                and key[start + shared] == prefix[start + shared]
            ):
                shared += 1
            if shared > best:
                best, pages = shared, set()
            if shared == best:
                pages.add(page_id)
        return whole, best, pages

    def compare(self) -> None:
        """The cache and the dictionary agree; the ledger adds up; nothing held has gone."""
        cache = self.cache
        invariants.check(cache, owned=self.owned())
        self.prune()
        assert self.tree == self.directory.prefixes
        held = self.held()
        assert held <= set(self.tree)
        assert cache.num_cached_pages == len(self.tree)
        assert cache.num_available == cache.pages.num_free + len(set(self.tree) - held)
        for promise, contents in self.promises:
            assert [self.stored[slot] for slot in promise.slots] == contents
        pinned = set()
        for pin in self.pins:
            pinned.update(pin.lease.page_ids)
            pinned.update([pin.lease.tail.page_id] if pin.lease.tail else [])
        assert cache.num_pinned_pages == len(pinned)

    def prune(self) -> None:
        """Forget pages that were evicted; before anything can use them again."""
        pages = self.cache.pages
        for page_id in [p for p in self.tree if pages.state(p) is not PageState.CACHED]:
            del self.tree[page_id]
            self.logprobs.pop(page_id, None)

    def allocate(self, num_pages: int) -> list[int] | None:
        before = self.cache.num_available
        evictable = set(self.tree) - self.held()
        pages = self.cache.allocate(num_pages, by="test")
        assert (pages is None) == (num_pages > before)
        gone = {p for p in self.tree if self.cache.pages.state(p) is not PageState.CACHED}
        assert gone <= evictable
        self.prune()
        return pages

    # Operations

    def random_key(self) -> list[int]:
        """Often a prefix of something cached, here or in the tier, with something else behind."""
        key: list[int] = []
        known = [*self.tree.values(), *self.stored.values()]
        if known and self.random.random() < 0.7:
            _, prefix = self.random.choice(known)
            key = list(prefix[: self.random.randint(0, len(prefix))])
        length = self.random.choice([0, 1, 2, self.page_size, self.random.randint(0, 20)])
        return key + [self.random.randrange(self.num_tokens) for _ in range(length)]

    def check_match(self, match: Match, key: list[int]) -> None:
        whole, num_tail_tokens, tails = self.expected_match(key, match.namespace)
        assert list(match.page_ids) == whole
        assert match.num_tokens == len(whole) * self.page_size + num_tail_tokens
        if num_tail_tokens:
            assert match.tail is not None
            assert match.tail.num_tokens == num_tail_tokens
            assert match.tail.page_id in tails
        else:
            assert match.tail is None
        expected: list[float | None] = []
        pages = [(p, self.page_size) for p in match.page_ids]
        if match.tail:
            pages.append((match.tail.page_id, match.tail.num_tokens))
        for page_id, num_tokens in pages:
            known = self.logprobs.get(page_id, {})
            expected += [known.get(place) for place in range(num_tokens)]
        for place, (found, known) in enumerate(
            zip(self.cache.logprobs(match), expected, strict=True)
        ):
            if known is None and found is not None:  # handed over by a tail that was subsumed
                assert found in self.said[match.namespace, tuple(key[: place + 1])]
            else:
                assert found == known

    def step(self) -> None:
        operations = {
            self.do_match: 8.0,
            self.do_start: 14,
            self.do_compute: 20,
            self.do_finish: 8,
            self.do_cancel: 4,
            self.do_insert: 6,
            self.do_evict: 4,
            self.do_late_lease: 4,
            self.do_pin: 3,
            self.do_unpin: 3,
            self.do_flush: 0.5,
            self.do_logprobs: 4,
            self.do_misuse: 2,
            self.do_explain: 2,
            self.do_fork: 4,
            self.do_advance: 4,
        }
        if self.cache.tier is not None:
            operations |= {self.do_promise: 3, self.do_restore: 6}
        operation = self.random.choices(list(operations), list(operations.values()))[0]
        operation()
        self.compare()

    def do_match(self) -> None:
        key = self.random_key()
        namespace = self.random.choice(self.namespaces)
        match = self.cache.match(key, namespace)
        self.check_match(match, key)
        self.matches = [*self.matches[-5:], match]

    def do_start(self) -> None:
        """Match, lease and copy the tail, as a sequence does that is admitted."""
        key = self.random_key()
        match = self.cache.match(key, self.random.choice(self.namespaces))
        self.check_match(match, key)
        lease = self.cache.lease(match)
        running = Running(key[: match.num_tokens], lease, [])
        self.running.append(running)
        if match.tail:
            pages = self.allocate(1)
            if pages is None or self.random.random() < 0.2:
                running.token_ids = running.token_ids[: lease.num_pages * self.page_size]
                if pages:
                    self.cache.pages.free(pages)
            else:
                running.own = pages
        if self.random.random() < 0.8:
            lease.drop_tail()

    def do_compute(self) -> None:
        """Some more tokens, with the pages they need; then whole pages are published."""
        if not self.running:
            return
        running = self.random.choice(self.running)
        more = [self.random.randrange(self.num_tokens) for _ in range(self.random.randint(1, 9))]
        num_pages = -(-(len(running.token_ids) + len(more)) // self.page_size)
        num_new = num_pages - running.lease.num_pages - len(running.own)
        pages = self.allocate(max(num_new, 0))
        if pages is None:
            return
        running.own += pages
        running.token_ids += more
        if self.random.random() < 0.7:
            self.publish(running, tail=False)

    def give(self, lease: Lease, tokens: list[int], table: list[int], tail: bool) -> Published:
        """To the tree, the whole block table or what is new of it."""
        held, whole = lease.num_pages, len(tokens) // self.page_size
        if tail or whole < held or self.random.random() < 0.5:
            return lease.publish(tokens, table, tail=tail)
        new_tokens = tokens[held * self.page_size : whole * self.page_size]
        new_pages = table[held:whole]
        now_there = lease.append(new_tokens, new_pages)
        num_folded = sum(a != b for a, b in zip(now_there, new_pages, strict=True))
        return Published(lease.page_ids, num_folded)

    def publish(self, running: Running, tail: bool) -> None:
        size = self.page_size
        tokens, lease = running.token_ids, running.lease
        table = [*lease.page_ids, *running.own]
        num_before, num_whole = lease.num_pages, len(tokens) // size
        known = {entry: page_id for page_id, entry in self.tree.items()}
        published = self.give(lease, tokens, table, tail)
        assert lease.num_pages == num_whole
        assert published.page_ids[:num_before] == tuple(table[:num_before])
        num_folded = 0
        for place in range(num_before, num_whole):
            entry = (lease.namespace, tuple(tokens[: (place + 1) * size]))
            page_id = published.page_ids[place]
            assert page_id == known.get(entry, table[place])
            num_folded += page_id != table[place]
            self.tree[page_id] = entry
        assert published.num_folded == num_folded
        running.own = [] if tail else table[num_whole:]
        if tail and len(tokens) % size:
            end = (lease.namespace, tuple(tokens))
            start = num_whole * size
            has = any(
                namespace == end[0]
                and start < len(prefix) <= start + size
                and prefix[: len(tokens)] == end[1]
                for namespace, prefix in self.tree.values()
            )
            assert (published.tail is None) == has
            if published.tail:
                assert published.tail.page_id == table[num_whole]
                self.tree[published.tail.page_id] = end

    def do_finish(self) -> None:
        if self.running:
            running = self.running.pop(self.random.randrange(len(self.running)))
            self.publish(running, tail=True)
            running.lease.release()

    def do_cancel(self) -> None:
        """A sequence ends with nothing published besides what was."""
        if self.running:
            running = self.running.pop(self.random.randrange(len(self.running)))
            running.lease.release()
            self.cache.pages.free(running.own)
            try:
                running.lease.release()
            except LeaseReleased:
                return
            raise AssertionError("released twice")

    def do_insert(self) -> None:
        key = self.random_key()
        namespace = self.random.choice(self.namespaces)
        size = self.page_size
        pages = self.allocate(-(-len(key) // size))
        if pages is None:
            return
        running = Running(key, self.cache.match_and_lease([], namespace), pages)
        known = {entry for page_id, entry in self.tree.items() if page_id in self.held()}
        running.lease.release()
        published = self.cache.insert(key, pages, namespace)
        for place, page_id in enumerate(published.page_ids):
            self.tree[page_id] = (namespace, tuple(key[: (place + 1) * size]))
        if published.tail:
            self.tree[published.tail.page_id] = (namespace, tuple(key))
        assert known <= set(self.tree.values())
        assert self.cache.match(key, namespace).num_tokens == len(key)

    def do_evict(self) -> None:
        num_pages = self.random.choice([1, 1, 2, 5, 1000])
        evictable = self.cache.num_available - self.cache.pages.num_free
        whole = [entry for entry in self.tree.values() if len(entry[1]) % self.page_size == 0]
        assert self.cache.evict(num_pages) == min(num_pages, evictable)
        self.prune()
        gone = set(whole) - set(self.tree.values())
        tier = self.cache.tier
        if tier is not None and not self.promises and len(gone) <= tier.num_slots:
            assert gone <= self.in_tier()

    def do_promise(self) -> None:
        """Slots are kept for later, or not after all."""
        if self.promises and self.random.random() < 0.6:
            promise, contents = self.promises.pop(self.random.randrange(len(self.promises)))
            assert [self.stored[slot] for slot in promise.slots] == contents
            self.random.choice([promise.fulfil, promise.cancel])()
            return
        match = self.cache.match(self.random_key(), self.random.choice(self.namespaces))
        expected = self.expected_promise(match)
        assert self.cache.num_tier_pages(match) == len(expected)
        with self.cache.lease(match) as lease:
            promise = lease.promise(match.found.key)
        assert [self.stored[slot] for slot in promise.slots] == expected
        self.promises.append((promise, expected))

    def do_restore(self) -> None:
        """As a sequence that is admitted: pages of its own for what the tier has, published."""
        key = self.random_key()
        match = self.cache.match(key, self.random.choice(self.namespaces))
        lease = self.cache.lease(match)
        lease.drop_tail()
        promise = lease.promise(key)
        contents = [self.stored[slot] for slot in promise.slots]
        self.promises.append((promise, contents))
        own = self.allocate(promise.num_pages)
        assert [self.stored[slot] for slot in promise.slots] == contents
        self.promises.pop()
        if own is None:
            promise.cancel()
            lease.release()
            return
        promise.fulfil()
        end = (len(match.page_ids) + len(own)) * self.page_size
        running = Running(key[:end], lease, own)
        self.running.append(running)
        self.publish(running, tail=False)

    def do_late_lease(self) -> None:
        """A match made some time ago: leased as it was, or refused since some of it is gone."""
        if not self.matches:
            return
        match = self.matches.pop(self.random.randrange(len(self.matches)))
        key = match.found.key[: match.num_tokens]
        try:
            lease = self.cache.lease(match)
        except StaleMatch:
            whole, num_tail_tokens, tails = self.expected_match(key, match.namespace)
            there_is = (whole, num_tail_tokens, tails)
            tail = match.tail
            # Where two pages begin with the tail's tokens, either may be found the second time.
            assert len(tails) > 1 or there_is != (
                list(match.page_ids),
                tail.num_tokens if tail else 0,
                {tail.page_id} if tail else set(),
            )
            return
        assert lease.page_ids == match.page_ids
        assert lease.tail == match.tail
        self.check_match(self.cache.match(key, match.namespace), key)
        for place, page_id in enumerate(match.page_ids):
            end = (place + 1) * self.page_size
            assert self.tree[page_id] == (match.namespace, tuple(key[:end]))
        lease.drop_tail()
        self.running.append(Running(key[: len(match.page_ids) * self.page_size], lease, []))

    def do_pin(self) -> None:
        match = self.cache.match(self.random_key(), self.random.choice(self.namespaces))
        try:
            self.pins.append(self.cache.pin(match))
        except PinBudgetExceeded as error:
            assert error.num_pages_needed > error.num_pages_left  # noqa: PT017

    def do_unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.random.randrange(len(self.pins))).release()

    def do_flush(self) -> None:
        """Of one namespace, or of all."""
        namespace = self.random.choice([*self.namespaces, None])
        held = self.held()
        kept = {p for p, (other, _) in self.tree.items() if namespace not in (None, other)} | held
        before = self.cache.num_cached_pages
        assert self.cache.flush(namespace) == before - len(kept)
        self.prune()
        assert set(self.tree) == kept
        assert not any(namespace in (None, other) for other, _ in self.in_tier())

    def do_fork(self) -> None:
        """A second sequence with the same pages, which goes its own way."""
        if self.running:
            parent = self.random.choice(self.running)
            num_tokens = parent.lease.num_pages * self.page_size
            lease = parent.lease.copy()
            assert (lease.page_ids, lease.tail) == (parent.lease.page_ids, parent.lease.tail)
            self.running.append(Running(parent.token_ids[:num_tokens], lease, []))

    def do_advance(self) -> None:
        """A sequence with nothing of its own takes up what others computed since."""
        waiting = [running for running in self.running if not running.own]
        if not waiting:
            return
        running = self.random.choice(waiting)
        lease = running.lease
        start = lease.num_pages * self.page_size
        keys = [
            list(prefix)
            for namespace, prefix in self.tree.values()
            if namespace == lease.namespace and prefix[:start] == tuple(running.token_ids[:start])
        ]
        key = self.random.choice(keys or [running.token_ids[:start]]) + self.random_key()
        before = lease.num_tokens
        whole, num_tail_tokens, tails = self.expected_match(key, lease.namespace)
        assert lease.advance(key) == lease.num_tokens - before
        assert list(lease.page_ids) == whole
        if num_tail_tokens:
            assert lease.tail is not None
            assert lease.tail.num_tokens == num_tail_tokens
            assert lease.tail.page_id in tails
        else:
            assert lease.tail is None
        running.token_ids = key[: lease.num_pages * self.page_size]

    def do_logprobs(self) -> None:
        if not self.running:
            return
        lease = self.random.choice(self.running).lease
        start = self.random.randint(0, lease.num_tokens)
        values = [-self.random.random() for _ in range(start, lease.num_tokens)]
        lease.set_logprobs(start, values)
        pages = lease.page_ids + ((lease.tail.page_id,) if lease.tail else ())
        for place, value in enumerate(values, start):
            known = self.logprobs.setdefault(pages[place // self.page_size], {})
            known[place % self.page_size] = value
            namespace, prefix = self.tree[pages[place // self.page_size]]
            self.said.setdefault((namespace, prefix[: place + 1]), set()).add(value)
        assert lease.logprobs()[start:] == values

    def do_misuse(self) -> None:
        """A refused call changes nothing."""
        num_pages = self.cache.pages.num_pages
        for page_id in [*islice(self.tree, 3), num_pages, num_pages + 5, -1, -num_pages]:
            before = self.cache.num_available
            for act in (
                lambda p=page_id: self.cache.pages.free([p]),
                lambda p=page_id: self.cache.insert([-5], [p]),
            ):
                try:
                    act()
                except ValueError:
                    assert self.cache.num_available == before
                else:
                    raise AssertionError(f"page {page_id} was not refused")

    def do_explain(self) -> None:
        key = self.random_key()
        namespace = self.random.choice(self.namespaces)
        explanation = self.cache.explain(key, namespace)
        whole, num_tail_tokens, _ = self.expected_match(key, namespace)
        assert explanation.num_cached_tokens == len(whole) * self.page_size + num_tail_tokens
        ends = [0] + [stretch.end for stretch in explanation.stretches]
        assert ends[:-1] == [stretch.start for stretch in explanation.stretches]
        assert ends[-1] == len(key)
        match = self.cache.peek(key, namespace)
        there = [s for s in explanation.stretches if s.reason is Reason.IN_TIER]
        num_pages = len(self.expected_promise(match))
        if num_pages:
            end = (len(match.page_ids) + num_pages) * self.page_size
            assert [(s.start, s.end) for s in there] == [(match.num_tokens, end)]
        else:
            assert not there

    def wind_down(self) -> None:
        """End everything; the pool is back to idle."""
        for running in self.running:
            running.lease.release()
            self.cache.pages.free(running.own)
        for pin in self.pins:
            pin.release()
        for promise, _ in self.promises:
            promise.cancel()
        self.running, self.pins, self.promises = [], [], []
        self.compare()
        assert self.cache.num_available == self.cache.pages.num_pages
        self.cache.flush()
        self.compare()
        assert self.cache.pages.num_free == self.cache.pages.num_pages
        assert not self.cache.tree.roots
        assert self.cache.tier is None or len(self.cache.tier.free_slots()) == (
            self.cache.tier.num_slots
        )
