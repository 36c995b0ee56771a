"""What makes lexemes alike, so that masks can be shared, and how far it is out of one."""

from __future__ import annotations

from collections.abc import Callable

from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Kind, Term, digest_of

_EXPLORED = 1000  # terms
_UNKNOWN = -1
_BYTES_PER_CHARACTER = 6  # at most, in the shortest of its spellings


class Lexemes:
    """Questions about the lexemes of one store."""

    def __init__(self, store: TermStore) -> None:
        self._store = store

    def clamp(self, term: Term, num_bytes: int) -> Term:
        """A lexeme with the same strings' prefixes of up to `num_bytes` bytes, counters cut short.

        A counter that such a prefix cannot exhaust might as well be endless, so that states deep
        inside a long string share one mask. Only the counters of the outermost sequence are cut,
        and within an intersection only those that count any characters.
        """
        if term.kind == Kind.LEXEME:
            return self._store.lexeme(self.clamp(term.items[0], num_bytes))
        if term.kind == Kind.ALTERNATION:
            return self._store.alternation(self.clamp(item, num_bytes) for item in term.items)
        return self._store.sequence(*(self._clamp_element(e, num_bytes) for e in term.spine))

    def _clamp_element(self, term: Term, num_bytes: int) -> Term:
        if term.kind == Kind.BOTH:
            return self._clamp_both(term, num_bytes)
        if term.kind != Kind.REPEAT or term.items[0].nullable:
            return term
        high = term.high if term.high is not None and term.high <= num_bytes else None
        return self._store.repeat(term.items[0], min(term.low, num_bytes + 1), high)

    def _clamp_both(self, term: Term, num_bytes: int) -> Term:
        """What else is asked for can be completed within `detour` characters, wherever a prefix
        ends. A maximum that is further off than that can neither be met nor make it impossible.
        """
        others, counters = self._store.split_counters(term)
        detour = self.detour(others) if counters and others is not None else None
        if detour is None or others is None:
            return term
        return self._store.both(
            others, *(self._without_end(c, num_bytes + detour) for c in counters)
        )

    def without_exclusion(self, lexeme: Term) -> Term | None:
        """The lexeme as it would be if a finite number of words were not excluded from it.

        None if there is no such exclusion. A prefix that can be completed with them can be
        completed without them: any characters may follow, so some lead away from all of them.
        """
        elements = lexeme.items[0].spine if lexeme.kind == Kind.LEXEME else []
        searched = [i for i, element in enumerate(elements) if element.is_searched]
        if len(searched) != 1 or elements[searched[0]].kind != Kind.BOTH:
            return None
        others, counters = self._store.split_counters(elements[searched[0]])
        ends = [each.spine[-1] for counter in counters for each in counter.alternatives]
        is_open = all(end.low == 0 and end.high is None for end in ends)
        if len(counters) != 1 or others is None or not is_open or not _excludes_finitely(others):
            return None
        elements[searched[0]] = counters[0]
        return self._store.lexeme(self._store.sequence(*elements))

    def without_words(self, lexeme: Term) -> tuple[Term, Term] | None:
        """The lexeme without its exclusion of words, and these; None if there is no such."""
        inner = lexeme.items[0] if lexeme.kind == Kind.LEXEME else lexeme
        if inner.kind != Kind.BOTH:
            return None
        excluded = [
            item.items[0]
            for item in inner.items
            if item.kind == Kind.NOT and item.items[0].kind in (Kind.WORDS, Kind.EPSILON)
        ]
        others = [item for item in inner.items if item.kind != Kind.NOT]
        if len(excluded) != 1 or len(others) != len(inner.items) - 1:
            return None
        return self._store.lexeme(self._store.both(*others)), excluded[0]

    def _without_end(self, term: Term, far: int) -> Term:
        if term.kind == Kind.ALTERNATION:
            return self._store.alternation(self._without_end(item, far) for item in term.items)
        *before, counter = term.spine
        if counter.high is not None and counter.high >= far:
            counter = self._store.repeat(counter.items[0], counter.low, None)
        return self._store.sequence(*before, counter)

    def digest(self, term: Term) -> bytes:
        """Equal for regular terms of equal structure, also of other stores."""

        def is_known(each: Term) -> bool:
            return each.digest is not None

        def learn(each: Term) -> None:
            each.digest = self._digest(each)

        _settle(term, is_known, learn)
        assert term.digest is not None
        return term.digest

    def _digest(self, term: Term) -> bytes:
        head = f"{term.kind:d},{term.bits:x},{term.low},{term.high},{term.depth}".encode()
        if term.kind == Kind.WORDS:
            assert term.words is not None
            words = term.words.words[term.low : term.high]
            if len(words) <= 16:
                return digest_of(b"suffixes", *(word[term.depth :] for word in words))
            return digest_of(head, term.words.digest)
        if term.kind == Kind.TABLE:
            assert term.table is not None
            return digest_of(head, term.table.digest)
        items = [item.digest or b"" for item in term.items]
        if term.kind in (Kind.ALTERNATION, Kind.BOTH):
            items.sort()
        return digest_of(head, *items)

    def detour(self, term: Term) -> int | None:
        """At most how many bytes complete a regular term from anywhere inside it.

        Read off the shape, or else by a search; None if that would be long.
        """
        if term.detour_length is None:
            if term.is_searched:
                detour = self._searched_detour(term)
                term.detour_length = _UNKNOWN if detour is None else detour
            else:
                _settle(term, lambda t: t.detour_length is not None, self._learn_detour)
        return term.detour_length if term.detour_length != _UNKNOWN else None

    def _searched_detour(self, term: Term) -> int | None:
        if term.kind == Kind.LEXEME:
            return self.detour(term.items[0])
        if term.kind == Kind.SEQUENCE:
            longest = after = 0
            for element in reversed(term.spine):
                inside = self.detour(element)
                if inside is None:
                    return None
                longest = max(longest, inside + after)
                after += self._store.min_bytes(element)
            return longest
        if term.kind == Kind.BOTH:
            others, counters = self._store.split_counters(term)
            if counters and others is not None:
                return self._counted_detour(others, counters)
        return self._explored_detour(term)

    def _counted_detour(self, others: Term, counters: list[Term]) -> int | None:
        """As without the counters, unless the end of one is closer than that, so that a text of
        fewer but longer characters is needed.
        """
        ends = [each.spine[-1] for counter in counters for each in counter.alternatives]
        if _excludes_finitely(others) and all(e.low == 0 and e.high is None for e in ends):
            # Finish the character that has begun, and add one that leads away from every word.
            return 4 * _BYTES_PER_CHARACTER
        detour = self.detour(others) if all(end.low == 0 for end in ends) else None
        if detour is None:
            detour = min((end.high for end in ends if end.high is not None), default=None)
        return None if detour is None else (detour + 2) * _BYTES_PER_CHARACTER

    def _learn_detour(self, term: Term) -> None:
        inner = [item.detour_length or 0 for item in term.items]
        if term.kind == Kind.WORDS:
            assert term.words is not None
            term.detour_length = max(map(len, term.words.words[term.low : term.high]))
        elif term.kind == Kind.TABLE:
            assert term.table is not None
            term.detour_length = max(term.table.distances)
        elif term.kind == Kind.SEQUENCE:
            term.detour_length = max(inner[0] + self._store.min_bytes(term.items[1]), inner[1])
        elif term.kind == Kind.REPEAT:
            others = max(term.low - 1, 0) * self._store.min_bytes(term.items[0])
            term.detour_length = inner[0] + others
        else:
            term.detour_length = max(inner, default=0)

    def _explored_detour(self, term: Term) -> int | None:
        """The longest of the shortest ways out, over everything that can be reached."""
        arrivals: dict[Term, list[Term]] = {term: []}
        pending = [term]
        while pending and len(arrivals) <= _EXPLORED:
            here = pending.pop()
            self._store.spend()
            for _, after in self._store.parts(here):
                if after not in arrivals:
                    arrivals[after] = []
                    pending.append(after)
                arrivals[after].append(here)
        longest = _UNKNOWN
        if not pending:
            done = {each for each in arrivals if each.nullable}
            level = list(done)
            while level:
                longest += 1
                level = [before for each in level for before in arrivals[each]]
                level = [each for each in dict.fromkeys(level) if each not in done]
                done.update(level)
        for each in arrivals:
            if each.is_searched:
                each.detour_length = longest
        return longest if longest != _UNKNOWN else None


def _settle(term: Term, is_known: Callable[[Term], bool], learn: Callable[[Term], None]) -> None:
    """Learn about a term and, first, about its items; without recursion, for deep terms."""
    pending = [term]
    while pending:
        top = pending[-1]
        if is_known(top):
            pending.pop()
            continue
        unknown = [item for item in top.items if not is_known(item)]
        if unknown:
            pending += unknown
        else:
            learn(top)
            pending.pop()


def _excludes_finitely(term: Term) -> bool:
    return term.kind == Kind.NOT and term.items[0].is_finite
