"""Which pages a sequence's keys and values lie in: admission, growth, publication, release."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby

from palmette.radix_cache import (
    Lease,
    Match,
    Promise,
    RadixCache,
    num_pages_freed_without,
    num_unheld_pages,
)
from palmette.runtime.kv.moves import Move, PageCopy, PageRestore
from palmette.runtime.sequence import Handle, Sequence, shared_length

# So many pages of an output are given to the tree together: each time costs some 50 us, since a
# forward pass has just been through the processor's caches.
_PAGES_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Prefix:
    """The best beginning of a sequence that has keys and values already.

    `num_tokens` tokens, of which whole pages come from the tree as they are, or are brought back
    from the tier; the rest, if any, is the beginning of page `partial_page`, to be copied.
    """

    num_tokens: int
    partial_page: int | None


class KVManager:
    """Gives pages to sequences and takes them back.

    Every page is in exactly one place: free, owned by one sequence, or in the tree. With
    `prefix_cache=False` nothing is shared and nothing is kept.
    """

    def __init__(self, cache: RadixCache, page_size: int, *, prefix_cache: bool = True) -> None:
        self.cache = cache
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._moves: list[Move] = []
        self._promises: list[Promise] = []  # of the restores among the moves

    @property
    def num_pages(self) -> int:
        return self.cache.pages.num_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or could be evicted."""
        return self.cache.num_available

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of its leading tokens the tree and the tier hold now. Asking counts as no use
        of them.
        """
        return self._num_cached(self._peek(sequence)) if self.prefix_cache else 0

    def known_logprobs(self, sequence: Sequence, first: int) -> SequenceOf[float | None]:
        """What the tree knows of log P(token | all before it) of its own tokens from position
        `first` on, as many as are cached.
        """
        if not self.prefix_cache or not self.cache.num_pages_with_logprobs:
            return ()
        match = self.cache.peek(sequence.token_ids, sequence.namespace)
        return self.cache.logprobs(match)[first:]

    def num_pages_taken(self, sequence: Sequence) -> int:
        """How many of the available pages it would take to compute all of `token_ids`.

        Cached pages that nobody holds yet are among them: they are available until then.
        """
        needed = self.num_pages_for(len(sequence.token_ids))
        if not self.prefix_cache:
            return needed
        handle = sequence.handle
        if handle is not None and not handle.lease.is_released:
            # More than it holds may be there, but this is asked often. The tail of its own branch
            # is copied and comes back.
            return needed - handle.lease.num_pages - (_tail_taken_over(sequence) is not None)
        match = self._peek(sequence)
        return needed - len(match.page_ids) + num_unheld_pages(match)

    def num_pages_freed_without(
        self, handles: Iterable[Handle], sequences: Iterable[Sequence]
    ) -> int:
        """How many pages would be available again if these ended and nothing went on from them."""
        leases = [handle.lease for handle in handles]
        num_owned = 0
        for sequence in sequences:
            num_owned += len(sequence.page_ids)
            if sequence.lease is not None:
                num_owned -= sequence.lease.num_pages
                leases.append(sequence.lease)
        return num_owned + num_pages_freed_without(leases)

    def find_leader(self, sequence: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """The running sequence that is about to compute the most tokens of `sequence` beyond those
        that are there already, if any; `sequence.leader_tokens` is set to where it will then be.

        Waiting for it costs nothing: the tokens would have to be computed all the same.
        """
        if not self.prefix_cache:
            return None
        limit = sequence.max_cached_tokens
        cached = self.cached_tokens(sequence)
        best, best_tokens = None, cached
        has_tier = self.cache.tier is not None
        for other in running:
            # What comes back from the tier for another is in the tree a step later: whoever could
            # have no more from the tier does better to share those pages than to copy them again.
            comes_back = has_tier and best_tokens > 0 and self._awaits_restore(other)
            above = best_tokens - 1 if comes_back else best_tokens
            shared = shared_length(sequence, other, limit, above)
            if shared <= above:
                continue
            # What it has computed, whole pages or not, can be had now (see `_partial_donor`).
            if other.num_computed_tokens >= shared and not comes_back:
                best, best_tokens = None, shared
            else:
                best, best_tokens = other, shared
        sequence.leader_tokens = best_tokens if best is not None else 0
        sequence.leader_from = cached
        return best

    def admit(
        self, sequence: Sequence, num_tokens: int, running: Iterable[Sequence], now: float
    ) -> bool:
        """Hold the cached prefix and room for `num_tokens` of the rest, or nothing at all.

        The whole rest must fit at this moment, so that a prompt is not begun that could not be
        finished.
        """
        token_ids = sequence.token_ids
        if not self.prefix_cache:
            if not self._has_room(sequence, 0):
                return False
            sequence.page_ids = self._allocate(sequence, self.num_pages_for(num_tokens))
            sequence.note_admitted(0, now)
            return True
        limit = sequence.max_cached_tokens
        self._publish_for(sequence, running)
        lease = self._lease(sequence, limit)
        whole_pages = list(lease.page_ids)
        # Before anything is allocated: what is evicted for it may push others out of the tier.
        promise = lease.promise(token_ids[:limit])
        prefix = self._best_prefix(sequence, lease, promise, running)
        # The copy runs before anything else is written, so its source need not be held; were it
        # held, a pool with no page to spare could never admit.
        lease.drop_tail()
        own_handle = _tail_taken_over(sequence)
        if own_handle is not None:
            own_handle.lease.drop_tail()
        if not self._has_room(sequence, lease.num_pages):
            promise.cancel()
            lease.release()
            return False
        if sequence.explains and sequence.admitted_at is None:  # before anything is evicted for it
            prompt = token_ids[: sequence.num_prompt_tokens]
            sequence.explanation = self.cache.explain(prompt, sequence.namespace)
        planned = min(prefix.num_tokens + num_tokens, len(token_ids))
        try:
            pages = self._allocate(sequence, self.num_pages_for(planned) - lease.num_pages)
        except BaseException:  # interrupted while evicted pages are copied to the tier
            promise.cancel()
            lease.release()
            raise
        # The source may have been evicted for these very pages: it is read before they are written.
        if prefix.partial_page is not None:
            self._moves.append(PageCopy(prefix.partial_page, pages[promise.num_pages]))
        self._moves += map(PageRestore, promise.slots, pages)
        self._promises.append(promise)
        sequence.lease = lease
        sequence.page_ids = whole_pages + pages
        sequence.note_admitted(prefix.num_tokens, now)
        self._note_next_publication(sequence, lease)
        return True

    def leaves_half_free(self, sequence: Sequence) -> bool:
        """Whether half the pool would still be free, or could be, once all of it is computed."""
        needed = self.num_pages_for(len(sequence.token_ids))
        return 2 * (self.cache.num_available - needed) >= self.num_pages

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for `num_tokens` more computed tokens; False changes nothing."""
        needed = self.num_pages_for(sequence.num_computed_tokens + num_tokens)
        missing = needed - len(sequence.page_ids)
        if missing > 0:
            pages = self.cache.allocate(missing, by=sequence.request_id)
            if pages is None:
                return False
            sequence.page_ids += pages
        return True

    def shrink(self, sequence: Sequence) -> None:
        """Take back the pages that none of its tokens needs: those of wrong guesses."""
        needed = self.num_pages_for(len(sequence.token_ids))
        if len(sequence.page_ids) > needed:
            self.cache.pages.free(sequence.page_ids[needed:])
            del sequence.page_ids[needed:]

    def publish(self, sequence: Sequence) -> None:
        """Share the whole pages that have been computed.

        Where another sequence was first with the same tokens, its page takes the place of ours.

        Worth it when `publish_at` tokens are computed: a page of the prompt at once, since others
        may wait for it, pages of the output several together. Whoever comes with a prompt that
        goes on from an output that is still being written has its pages published then.
        """
        lease = sequence.lease
        if lease is None:
            return
        size = self.page_size
        # What may be replaced is no page that others could share.
        num_settled = min(sequence.num_computed_tokens, sequence.num_settled_tokens)
        held, whole = lease.num_pages, num_settled // size
        if whole <= held:
            return
        new_token_ids = sequence.token_ids[held * size : whole * size]
        page_ids = lease.append(new_token_ids, sequence.page_ids[held:whole])
        sequence.page_ids[held:whole] = page_ids
        self._note_next_publication(sequence, lease)
        if sequence.found_logprobs:
            _keep_logprobs(sequence, lease)

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take the pages back. What was computed stays in the tree, unless `keep` is False."""
        lease = self._give_to_tree(sequence, keep=keep)
        if lease is not None:
            lease.release()

    def hold(self, sequence: Sequence) -> Handle | None:
        """Take the pages back, and keep what was computed for whoever goes on from there.

        None, and all is released, if nothing is kept in this cache.
        """
        num_computed = sequence.num_computed_tokens
        lease = self._give_to_tree(sequence, keep=True)
        if lease is None:
            return None
        if lease.num_tokens < num_computed:  # the tree had the last ones in a longer page already
            lease.advance(sequence.token_ids[:num_computed])
        return Handle(sequence.namespace, sequence.token_ids[: lease.num_tokens], lease)

    def _note_next_publication(self, sequence: Sequence, lease: Lease) -> None:
        size = self.page_size
        following = (lease.num_pages + 1) * size
        is_output = following > sequence.num_prompt_tokens and self.cache.tier is None
        # Log-probabilities become known to others with the pages they lie beside.
        if is_output and not sequence.finds_logprobs:
            following += (_PAGES_TOGETHER - 1) * size
        sequence.publish_at = following

    def _publish_for(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Share what running sequences have computed beyond their published pages, if this one
        begins with it.
        """
        size, limit = self.page_size, sequence.max_cached_tokens
        for other in running:
            if other.lease is None:
                continue
            published = other.lease.num_pages * size
            if (
                other.num_computed_tokens >= published + size
                and shared_length(sequence, other, limit, published) >= published + size
            ):
                self.publish(other)

    def _give_to_tree(self, sequence: Sequence, *, keep: bool) -> Lease | None:
        lease, page_ids = sequence.lease, sequence.page_ids
        sequence.lease, sequence.page_ids = None, []
        if lease is None:
            self.cache.pages.free(page_ids)
            return None
        held = lease.num_pages
        computed = sequence.num_computed_tokens
        used = self.num_pages_for(computed) if keep else held
        if used > held:
            lease.publish(sequence.token_ids[:computed], page_ids[:used], tail=True)
        if keep and sequence.found_logprobs:
            if lease.num_tokens < computed:  # the tree had the last ones, perhaps without them
                lease.advance(sequence.token_ids[:computed])
            _keep_logprobs(sequence, lease)
        self.cache.pages.free(page_ids[max(used, held) :])
        return lease

    def take_moves(self) -> list[Move]:
        """What to carry out, in this order, before the step's first write and before anything else
        is planned.
        """
        moves, self._moves = self._moves, []
        promises, self._promises = self._promises, []
        for promise in promises:
            promise.fulfil()
        return moves

    def drop_moves(self) -> None:
        """Carry none of them out. Pages that lack what was to come may be in the tree: flush it."""
        self._moves.clear()
        promises, self._promises = self._promises, []
        for promise in promises:
            promise.cancel()

    def _num_cached(self, match: Match) -> int:
        """Tokens of the match, or of its whole pages and what the tier has behind these."""
        num_tier_pages = self.cache.num_tier_pages(match)
        if not num_tier_pages:
            return match.num_tokens
        return (len(match.page_ids) + num_tier_pages) * self.page_size

    def _awaits_restore(self, sequence: Sequence) -> bool:
        """Whether it has whole pages that count as computed and are not in the tree yet."""
        num_whole = sequence.num_computed_tokens // self.page_size
        return sequence.lease is not None and num_whole > sequence.lease.num_pages

    def _peek(self, sequence: Sequence) -> Match:
        limit = sequence.max_cached_tokens
        key, handle = sequence.token_ids[:limit], sequence.handle
        if handle is not None and handle.fits(sequence.namespace, key, limit):
            return handle.lease.peek(key)
        return self.cache.peek(key, sequence.namespace)

    def _lease(self, sequence: Sequence, limit: int) -> Lease:
        """A hold on the longest cached prefix, `limit` tokens at most.

        Where a handle knows it, nothing is looked up again but what may have come behind it.
        """
        token_ids, handle = sequence.token_ids, sequence.handle
        if handle is not None and handle.fits(sequence.namespace, token_ids, limit):
            lease = handle.lease.copy()
            lease.advance(token_ids[:limit])
            return lease
        match = self.cache.match(token_ids[:limit], sequence.namespace)
        # Not counted as a hit: an admission may fail and be tried again, and a preempted sequence
        # that comes back is no new prompt. The engine's counters tell cached prompt tokens.
        return self.cache.lease(match, counted=False)

    def _has_room(self, sequence: Sequence, num_held: int) -> bool:
        """Whether pages for all of the sequence could be had, `num_held` of which it has."""
        in_all = self.num_pages_for(len(sequence.token_ids)) - num_held
        return in_all <= self.cache.num_available

    def _allocate(self, sequence: Sequence, num_pages: int) -> list[int]:
        """Pages for which there is room."""
        pages = self.cache.allocate(num_pages, by=sequence.request_id)
        assert pages is not None
        return pages

    def _best_prefix(
        self, sequence: Sequence, lease: Lease, promise: Promise, running: Iterable[Sequence]
    ) -> Prefix:
        """From the pages held, what the tier has behind them, and what running sequences have."""
        prefix = Prefix(lease.num_tokens, lease.tail.page_id if lease.tail else None)
        num_whole = lease.num_pages + promise.num_pages
        if promise.num_pages:
            prefix = Prefix(num_whole * self.page_size, None)
        return self._partial_donor(sequence, prefix, num_whole, running)

    def _partial_donor(
        self, sequence: Sequence, prefix: Prefix, num_whole: int, running: Iterable[Sequence]
    ) -> Prefix:
        """The same or a longer prefix, whose last page is copied from a running sequence's own.

        A running sequence publishes whole pages only; what it has computed of its last one can
        be copied all the same.
        """
        limit = sequence.max_cached_tokens
        for other in running:
            shared = shared_length(sequence, other, limit, prefix.num_tokens)
            shared = min(shared, other.num_computed_tokens)
            if shared > prefix.num_tokens and shared // self.page_size == num_whole:
                prefix = Prefix(shared, other.page_ids[num_whole])
        return prefix


def _keep_logprobs(sequence: Sequence, lease: Lease) -> None:
    """Put what was found of the tokens that the lease holds beside their pages."""
    found = sequence.found_logprobs
    positions = sorted(p for p in found if p < lease.num_tokens)
    for _, run in groupby(enumerate(positions), lambda item: item[1] - item[0]):
        together = [position for _, position in run]
        lease.set_logprobs(together[0], [found.pop(position) for position in together])


def _tail_taken_over(sequence: Sequence) -> Handle | None:
    """The handle of the sequence's own branch, if it holds a tail, which is to be copied."""
    handle = sequence.handle
    if handle is None or not sequence.takes_over or handle.lease.is_released:
        return None
    return handle if handle.lease.tail is not None else None
