"""The algebra of languages: hash-consed terms over bytes, and their derivatives.

A term is a set of byte strings. Regular terms are built from byte sets, word lists, sequences,
alternations, counted repetitions, intersections and complements; a `Rule` that is called makes a
grammar context-free. Terms are derived lazily (Brzozowski, *Derivatives of Regular Expressions*,
1964; Antimirov's linear forms, 1996), so a counter of ten thousand costs nothing until it is
walked, and nothing is ever unrolled.

A *lexeme* is a regular part that is determinised by itself, such as the body of a JSON string. It
looks the same wherever it stands, which is what lets masks be shared between places.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count

from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.limits import Limits

ALL_BYTES = (1 << 256) - 1

_SHORT_WORD = 256
_EXPLORED = 1000  # terms
_WORK_PER_LOOK = 256
_UNKNOWN = -1
_BYTES_PER_CHARACTER = 6  # at most, in the shortest of its spellings

_serials = count(1)


class Kind(IntEnum):
    """What a term is made of."""

    EMPTY = 0  # no string at all
    EPSILON = 1  # only the empty string
    BYTES = 2  # one byte out of `bits`
    WORDS = 3  # what is left of words[low:high] after their first `depth` bytes
    SEQUENCE = 4  # items[0], then items[1]; items[0] is not a sequence
    ALTERNATION = 5  # one of items
    REPEAT = 6  # items[0], at least low times and at most high (None: without end)
    BOTH = 7  # in each of items
    NOT = 8  # any byte string that is not in items[0]
    LEXEME = 9  # items[0], determinised by itself
    CALL = 10  # a rule


class WordList:
    """A sorted list of distinct words."""

    __slots__ = ("digest", "serial", "words")

    def __init__(self, words: Iterable[bytes]) -> None:
        self.words = sorted(set(words))
        self.serial = next(_serials)
        self.digest = _digest(b"words", *self.words)


class Rule:
    """A part of a grammar that is built when it is first needed.

    `build` gives its body, which must not be empty and is nullable exactly if `nullable`.
    `shortest` gives a term of the same or a smaller language that needs no choice between rules;
    `min_bytes` is the length of its shortest string.
    """

    __slots__ = (
        "_body",
        "_build",
        "_make_shortest",
        "_shortest",
        "is_expanding",
        "min_bytes",
        "name",
        "nullable",
    )

    def __init__(
        self,
        name: str,
        build: Callable[[], Term],
        *,
        shortest: Callable[[], Term],
        min_bytes: int,
        nullable: bool = False,
    ) -> None:
        self.name = name
        self.nullable = nullable
        self.min_bytes = min_bytes
        self.is_expanding = False
        self._build = build
        self._make_shortest = shortest
        self._body: Term | None = None
        self._shortest: Term | None = None

    def body(self) -> Term:
        if self._body is None:
            self._body = self._build()
        return self._body

    def shortest(self) -> Term:
        if self._shortest is None:
            self._shortest = self._make_shortest()
        return self._shortest


class Term:
    """One interned node; equal terms of one store are the same object until the store is cleared.

    `is_searched` marks a term with an intersection or a complement in it: whether it is empty
    cannot be read off its shape. `is_regular` marks one without calls, `is_finite` one that
    obviously has a limited number of strings.
    """

    __slots__ = (
        "bits",
        "depth",
        "detour_length",
        "digest",
        "floor",
        "form",
        "form_sets",
        "high",
        "is_finite",
        "is_regular",
        "is_searched",
        "items",
        "kind",
        "known_empty",
        "low",
        "nullable",
        "part_sets",
        "parts",
        "rule",
        "serial",
        "shortest",
        "shortest_length",
        "words",
    )

    def __init__(
        self,
        kind: Kind,
        nullable: bool,
        *,
        items: tuple[Term, ...] = (),
        bits: int = 0,
        low: int = 0,
        high: int | None = None,
        depth: int = 0,
        words: WordList | None = None,
        rule: Rule | None = None,
    ) -> None:
        self.kind = kind
        self.nullable = nullable
        self.items = items
        self.bits = bits
        self.low = low
        self.high = high
        self.depth = depth
        self.words = words
        self.rule = rule
        self.serial = next(_serials)
        self.is_searched: bool = kind in (Kind.BOTH, Kind.NOT) or any(i.is_searched for i in items)
        self.is_regular: bool = kind != Kind.CALL and all(i.is_regular for i in items)
        self.is_finite: bool = (
            kind not in (Kind.NOT, Kind.CALL)
            and not (kind == Kind.REPEAT and high is None)
            and all(i.is_finite for i in items)
        )
        self.floor = self._lower_bound()
        # Memos of the store.
        self.form: tuple[Term, ...] | None = None
        self.form_sets: tuple[int, ...] = ()
        self.parts: tuple[Term, ...] | None = None
        self.part_sets: tuple[int, ...] = ()
        self.known_empty: bool | None = None
        self.digest: bytes | None = None
        self.shortest: bytes | None = None
        self.shortest_length: int | None = None
        self.detour_length: int | None = None

    def _lower_bound(self) -> int:
        """A number of bytes that no string is shorter than, cheaply had."""
        if self.nullable:
            return 0
        if self.kind == Kind.SEQUENCE:
            return self.items[0].floor + self.items[1].floor
        if self.kind == Kind.ALTERNATION:
            return min(item.floor for item in self.items)
        if self.kind == Kind.REPEAT:
            return self.low * self.items[0].floor
        if self.kind == Kind.BOTH:
            return max(item.floor for item in self.items)
        if self.kind == Kind.LEXEME:
            return self.items[0].floor
        return 0 if self.kind == Kind.EMPTY else 1

    def __repr__(self) -> str:
        return f"<{self.kind.name.lower()} {self.serial}>"

    @property
    def spine(self) -> list[Term]:
        """The elements of a sequence, or the term itself."""
        elements = []
        term = self
        while term.kind == Kind.SEQUENCE:
            elements.append(term.items[0])
            term = term.items[1]
        elements.append(term)
        return elements

    @property
    def alternatives(self) -> tuple[Term, ...]:
        return self.items if self.kind == Kind.ALTERNATION else (self,)


# A set of bytes, and what may follow one of them.
_Pair = tuple[int, Term]
Form = Iterable[_Pair]

_Key = tuple[object, ...]


class TermStore:
    """Makes terms, keeps equal ones equal, and derives them, within `limits`.

    Strings with a byte outside `alphabet` are in no term: no token could spell them.
    """

    def __init__(self, limits: Limits, alphabet: int = ALL_BYTES) -> None:
        self.limits = limits
        self.alphabet = alphabet
        self._alphabet_bytes = bytes(i for i in range(256) if alphabet >> i & 1)
        self._interned: dict[_Key, Term] = {}
        self._rules: dict[_Key, Rule] = {}
        self._derived: list[Term] = []
        self._characters: set[Term] = set()
        self._character_parts: set[Term] | None = None
        self._deadline: float | None = None
        self._seconds = math.inf
        self._work = 0
        self.empty = Term(Kind.EMPTY, False)
        self.epsilon = Term(Kind.EPSILON, True)
        self.anything = Term(Kind.NOT, True, items=(self.empty,))
        self.empty.known_empty = True
        self.anything.known_empty = False
        self.anything.is_searched = False

    def __len__(self) -> int:
        return len(self._interned)

    def clear(self) -> None:
        """Forget what is interned and derived. Terms in use stay valid; new equal ones differ."""
        for term in self._derived:
            term.form = term.parts = None
            term.form_sets = term.part_sets = ()
        self._derived.clear()
        self._interned.clear()
        self._rules.clear()
        self._character_parts = None

    # Time

    def start_clock(self, seconds: float) -> None:
        """Give what follows in this thread `seconds`; past them, `GrammarTooComplex`.

        Processor time, so that a busy machine refuses no grammar that an idle one takes. Reading
        it costs more than a cached mask, so the clock runs from the first look at it.
        """
        self._seconds = seconds
        self._work = 0
        self._deadline = None

    def spend(self, work: int = 1) -> None:
        """Count work, and look at the clock now and then."""
        self._work += work
        if self._work >= _WORK_PER_LOOK:
            self._work = 0
            now = time.thread_time()
            if self._deadline is None:
                self._deadline = now + self._seconds
            elif now > self._deadline:
                raise GrammarTooComplex(f"the grammar needs more than {self._seconds:g} s of work")

    # Making terms

    def byte_set(self, bits: int) -> Term:
        """One byte out of `bits`."""
        bits &= self.alphabet
        if not bits:
            return self.empty
        key = (Kind.BYTES, bits)
        return self._interned.get(key) or self._keep(key, Term(Kind.BYTES, False, bits=bits))

    def literal(self, text: bytes) -> Term:
        """Exactly `text`."""
        if not self.can_spell(text):
            return self.empty
        return self._words(WordList([text]), 0, 1, 0)

    def can_spell(self, text: bytes) -> bool:
        """Whether every byte of `text` is in the alphabet."""
        return not text.translate(None, self._alphabet_bytes)

    def words(self, words: Iterable[bytes]) -> Term:
        """One of `words`."""
        listed = WordList(word for word in words if self.can_spell(word))
        return self._words(listed, 0, len(listed.words), 0)

    def _words(self, words: WordList, low: int, high: int, depth: int) -> Term:
        if low == high:
            return self.empty
        if high - low == 1 and len(words.words[low]) == depth:
            return self.epsilon
        key: _Key = (Kind.WORDS, words.serial, low, high, depth)
        if high - low == 1 and len(words.words[low]) - depth <= _SHORT_WORD:
            key = (Kind.WORDS, words.words[low][depth:])  # whichever list it comes from
        term = self._interned.get(key)
        if term is None:
            nullable = len(words.words[low]) == depth
            term = Term(Kind.WORDS, nullable, low=low, high=high, depth=depth, words=words)
            self._keep(key, term)
        return term

    def sequence(self, *terms: Term) -> Term:
        """The terms one after the other."""
        if not terms:
            return self.epsilon
        result = terms[-1]  # not taken apart: it may be a stack of any depth
        for term in reversed(terms[:-1]):
            for element in reversed(term.spine):
                result = self._pair(element, result)
        return result

    def _pair(self, head: Term, tail: Term) -> Term:
        if head.kind == Kind.EMPTY or tail.kind == Kind.EMPTY:
            return self.empty
        if head.kind == Kind.EPSILON:
            return tail
        if tail.kind == Kind.EPSILON:
            return head
        if head is self.anything and (
            tail is head or (tail.kind == Kind.SEQUENCE and tail.items[0] is head)
        ):
            return tail
        key = (Kind.SEQUENCE, head.serial, tail.serial)
        term = self._interned.get(key)
        if term is None:
            nullable = head.nullable and tail.nullable
            term = self._keep(key, Term(Kind.SEQUENCE, nullable, items=(head, tail)))
        return term

    def alternation(self, terms: Iterable[Term]) -> Term:
        """One of the terms."""
        items: dict[int, Term] = {}
        bits = 0
        for term in terms:
            for item in term.alternatives:
                if item.kind == Kind.BYTES:
                    bits |= item.bits
                elif item is self.anything:
                    return item
                elif item.kind != Kind.EMPTY:
                    items[item.serial] = item
        if bits:
            item = self.byte_set(bits)
            items[item.serial] = item
        if self.epsilon.serial in items and any(
            i.nullable for i in items.values() if i.kind != Kind.EPSILON
        ):
            del items[self.epsilon.serial]
        if not items:
            return self.empty
        if len(items) == 1:
            return next(iter(items.values()))
        if len(items) > self.limits.max_alternatives:
            raise GrammarTooComplex(
                f"more than {self.limits.max_alternatives} alternatives at one place"
            )
        serials = sorted(items)
        key = (Kind.ALTERNATION, *serials)
        found = self._interned.get(key)
        if found is None:
            members = tuple(items[s] for s in serials)
            nullable = any(i.nullable for i in members)
            found = self._keep(key, Term(Kind.ALTERNATION, nullable, items=members))
        return found

    def optional(self, term: Term) -> Term:
        return self.alternation((term, self.epsilon))

    def repeat(self, term: Term, low: int, high: int | None) -> Term:
        """`term` at least `low` times and at most `high` times; None is without end."""
        if high == 0 or term.kind == Kind.EPSILON:
            return self.epsilon
        if term.kind == Kind.EMPTY:
            return self.epsilon if low == 0 else self.empty
        if low == 1 and high == 1:
            return term
        if term.nullable:
            low = 0
            if term.kind == Kind.REPEAT and term.high is None and high is None:
                return term
        if term.kind == Kind.REPEAT and term.low == 0 and term.high is None and high is None:
            return term
        key = (Kind.REPEAT, term.serial, low, high)
        found = self._interned.get(key)
        if found is None:
            found = Term(Kind.REPEAT, low == 0, items=(term,), low=low, high=high)
            self._keep(key, found)
        return found

    def both(self, *terms: Term) -> Term:
        """What is in every one of the regular terms."""
        items: dict[int, Term] = {}
        for term in terms:
            for item in term.items if term.kind == Kind.BOTH else (term,):
                if item.kind == Kind.EMPTY:
                    return item
                if item is not self.anything:
                    items[item.serial] = item
        if not items:
            return self.anything
        if len(items) == 1:
            return next(iter(items.values()))
        members = tuple(items[s] for s in sorted(items))
        if any(i.kind == Kind.EPSILON for i in members):
            return self.epsilon if all(i.nullable for i in members) else self.empty
        if all(i.kind == Kind.BYTES for i in members):
            bits = ALL_BYTES
            for item in members:
                bits &= item.bits
            return self.byte_set(bits)
        key = (Kind.BOTH, *(i.serial for i in members))
        found = self._interned.get(key)
        if found is None:
            nullable = all(i.nullable for i in members)
            found = self._keep(key, Term(Kind.BOTH, nullable, items=members))
        return found

    def complement(self, term: Term) -> Term:
        """Every byte string that is not in the regular term."""
        if term.kind == Kind.EMPTY:
            return self.anything
        if term.kind == Kind.NOT:
            return term.items[0]
        key = (Kind.NOT, term.serial)
        found = self._interned.get(key)
        if found is None:
            found = self._keep(key, Term(Kind.NOT, not term.nullable, items=(term,)))
        return found

    def lexeme(self, term: Term) -> Term:
        """The same language, determinised by itself."""
        if term.kind in (Kind.EMPTY, Kind.EPSILON, Kind.BYTES, Kind.WORDS, Kind.LEXEME):
            return term
        key = (Kind.LEXEME, term.serial)
        found = self._interned.get(key)
        if found is None:
            found = self._keep(key, Term(Kind.LEXEME, term.nullable, items=(term,)))
        return found

    def call(self, rule: Rule) -> Term:
        """What the rule's body allows."""
        key = (Kind.CALL, rule)
        found = self._interned.get(key)
        if found is None:
            found = self._keep(key, Term(Kind.CALL, rule.nullable, rule=rule))
        return found

    def rule(self, key: tuple[object, ...], make: Callable[[], Rule]) -> Term:
        """A call of the rule that `make` gives, the same one for the same key."""
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = make()
        return self.call(rule)

    def _keep(self, key: _Key, term: Term) -> Term:
        self._interned[key] = term
        self.spend()
        return term

    # Derivatives

    def parts(self, term: Term) -> Form:
        """Disjoint byte sets, and for each the non-empty term that follows. Deterministic."""
        if term.parts is None:
            pairs = self._determinise(self.form(term))
            term.part_sets = tuple(bits for bits, _ in pairs)
            term.parts = tuple(after for _, after in pairs)
            if term.parts == term.form and term.part_sets == term.form_sets:
                term.part_sets, term.parts = term.form_sets, term.form  # one copy is enough
        return zip(term.part_sets, term.parts, strict=True)

    def form(self, term: Term) -> Form:
        """Byte sets, which may overlap, and for each a term that may follow, perhaps empty."""
        if term.form is None:
            pairs = self._derive(term)
            term.form_sets = tuple(bits for bits, _ in pairs)
            term.form = tuple(after for _, after in pairs)
            self._derived.append(term)
        return zip(term.form_sets, term.form, strict=True)

    def _derive(self, term: Term) -> list[_Pair]:
        kind = term.kind
        self.spend()
        if kind == Kind.BYTES:
            return [(term.bits, self.epsilon)]
        if kind == Kind.WORDS:
            return self._derive_words(term)
        if kind == Kind.SEQUENCE:
            return self._derive_sequence(term)
        if kind == Kind.ALTERNATION:
            self.spend(len(term.items))
            return [pair for item in term.items for pair in self.form(item)]
        if kind == Kind.REPEAT:
            item = term.items[0]
            high = None if term.high is None else term.high - 1
            rest = self.repeat(item, max(term.low - 1, 0), high)
            return [(bits, self.sequence(after, rest)) for bits, after in self.form(item)]
        if kind == Kind.BOTH:
            return self._derive_both(term)
        if kind == Kind.NOT:
            left = ALL_BYTES
            pairs = []
            for bits, after in self.parts(term.items[0]):
                left &= ~bits
                pairs.append((bits, self.complement(after)))
            return [*pairs, (left, self.anything)] if left else pairs
        if kind == Kind.LEXEME:
            return [(bits, self.lexeme(after)) for bits, after in self.parts(term.items[0])]
        if kind == Kind.CALL:
            return self._derive_call(term)
        return []

    def _derive_words(self, term: Term) -> list[_Pair]:
        assert term.words is not None
        assert term.high is not None
        words, depth = term.words.words, term.depth
        at = term.low + term.nullable
        pairs = []
        while at < term.high:
            byte = words[at][depth]
            end = bisect_right(words, byte, at, term.high, key=lambda word: word[depth])
            pairs.append((1 << byte, self._words(term.words, at, end, depth + 1)))
            at = end
        return pairs

    def _derive_sequence(self, term: Term) -> list[_Pair]:
        pairs: list[_Pair] = []
        while True:
            if term.kind != Kind.SEQUENCE:
                pairs.extend(self.form(term))
                break
            head, tail = term.items
            pairs.extend((bits, self.sequence(after, tail)) for bits, after in self.form(head))
            if not head.nullable:
                break
            term = tail
        return pairs

    def _derive_both(self, term: Term) -> list[_Pair]:
        first, *others = (list(self.parts(item)) for item in term.items)
        combined = [(bits, [after]) for bits, after in first]
        for parts in others:
            self.spend(len(combined) * len(parts) // 16)
            combined = [
                (bits & other_bits, [*afters, after])
                for bits, afters in combined
                for other_bits, after in parts
                if bits & other_bits
            ]
        pairs = ((bits, self.both(*afters)) for bits, afters in combined)
        return [pair for pair in pairs if pair[1].kind != Kind.EMPTY]

    def _derive_call(self, term: Term) -> list[_Pair]:
        rule = term.rule
        assert rule is not None
        if rule.is_expanding:
            raise GrammarTooComplex(f"{rule.name} begins with itself")
        rule.is_expanding = True
        try:
            return list(self.form(rule.body()))
        finally:
            rule.is_expanding = False

    def _determinise(self, form: Form) -> list[_Pair]:
        seen = 0
        parts: list[tuple[int, list[Term]]] = []
        for bits, after in form:
            if after.is_searched and self.is_empty(after):
                continue
            if not bits & seen:
                parts.append((bits, [after]))
                seen |= bits
                continue
            self.spend(len(parts) // 16)
            left = bits
            for i in range(len(parts)):
                known, afters = parts[i]
                common = known & left
                if not common:
                    continue
                if common == known:
                    afters.append(after)
                else:
                    parts[i] = (known & ~common, afters)
                    parts.append((common, [*afters, after]))
                left &= ~common
                if not left:
                    break
            if left:
                parts.append((left, [after]))
            seen |= bits
        merged: dict[Term, int] = {}
        for bits, afters in parts:
            after = afters[0] if len(afters) == 1 else self.alternation(afters)
            merged[after] = merged.get(after, 0) | bits
        return [(bits, after) for after, bits in merged.items()]

    # Questions

    def is_empty(self, term: Term) -> bool:
        """Whether no string is in the term. Decided by search where the shape does not tell."""
        if term.kind == Kind.EMPTY:
            return True
        if not term.is_searched:
            return False
        if term.known_empty is None:
            term.known_empty = self._decide_empty(term)
        return term.known_empty

    def _decide_empty(self, term: Term) -> bool:
        if term.kind == Kind.SEQUENCE:
            return any(self.is_empty(element) for element in term.spine)
        if term.kind == Kind.ALTERNATION:
            return all(self.is_empty(item) for item in term.items)
        if term.kind == Kind.REPEAT:
            return term.low > 0 and self.is_empty(term.items[0])
        if term.kind == Kind.LEXEME:
            return self.is_empty(term.items[0])
        return self._search_empty(term)

    def _without_counters(self, term: Term) -> tuple[bool, bytes | None]:
        """What an intersection is without its counters: whether it is empty even so, and a
        shortest string of it, if the counters happen to allow that one.
        """
        if term.kind != Kind.BOTH:
            return False, None
        others, counters = self._split_counters(term)
        if not counters or others is None:
            return False, None
        if self.is_empty(others):
            return True, None
        text = self.shortest(others)
        return False, text if all(self.accepts(counter, text) for counter in counters) else None

    def accepts(self, term: Term, text: bytes) -> bool:
        """Whether the string is in the term."""
        for byte in text:
            for bits, after in self.parts(term):
                if bits >> byte & 1:
                    term = after
                    break
            else:
                return False
        return term.nullable

    def _search_empty(self, term: Term) -> bool:
        """Best-first over the derivatives, towards those that may end soonest."""
        is_empty, text = self._without_counters(term)
        if is_empty or text is not None:
            return is_empty
        reached_from: dict[Term, Term | None] = {term: None}
        queue = [(term.floor, 0, term)]
        while queue:
            _, _, here = heappop(queue)
            self.spend()
            if here.nullable or not here.is_searched or here.known_empty is False:
                step: Term | None = here
                while step is not None:
                    step.known_empty = False
                    step = reached_from[step]
                return False
            for _, after in self.form(here):
                is_hopeless = after.kind == Kind.EMPTY or after.known_empty is True
                if not is_hopeless and after not in reached_from:
                    reached_from[after] = here
                    heappush(queue, (after.floor, -after.serial, after))
        for here in reached_from:
            here.known_empty = True
        return True

    def _settle(
        self, term: Term, is_known: Callable[[Term], bool], learn: Callable[[Term], None]
    ) -> None:
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

    def min_bytes(self, term: Term) -> int:
        """The length of a shortest string; the term must not be empty."""

        def is_known(each: Term) -> bool:
            return each.shortest_length is not None

        def learn(each: Term) -> None:
            each.shortest_length = self._min_bytes(each)

        if term.shortest_length is None:
            self._settle_non_empty(term, is_known, learn)
        assert term.shortest_length is not None
        return term.shortest_length

    def shortest(self, term: Term) -> bytes:
        """A shortest string of a regular term that is not empty."""

        def is_known(each: Term) -> bool:
            return each.shortest is not None

        def learn(each: Term) -> None:
            each.shortest = self._shortest(each)

        if term.shortest is None:
            self._settle_non_empty(term, is_known, learn)
        assert term.shortest is not None
        return term.shortest

    def _settle_non_empty(
        self, term: Term, is_known: Callable[[Term], bool], learn: Callable[[Term], None]
    ) -> None:
        """The same, but leaving out what is empty or needs a search of its own."""

        def is_done(each: Term) -> bool:
            return is_known(each) or (each is not term and self.is_empty(each))

        def learn_one(each: Term) -> None:
            if each.kind in (Kind.BOTH, Kind.NOT) and not each.nullable:
                self._search_shortest(each)
            learn(each)

        pending = [term]
        while pending:
            top = pending[-1]
            is_searched = top.nullable or top.kind in (Kind.BOTH, Kind.NOT)
            unknown = [] if is_searched else [i for i in top.items if not is_done(i)]
            if unknown and not is_known(top):
                pending += unknown
                continue
            if not is_known(top):
                learn_one(top)
            pending.pop()

    def _min_bytes(self, term: Term) -> int:
        if term.nullable:
            return 0
        if term.kind == Kind.BYTES:
            return 1
        if term.kind == Kind.WORDS:
            assert term.words is not None
            return min(map(len, term.words.words[term.low : term.high])) - term.depth
        if term.kind == Kind.CALL:
            assert term.rule is not None
            return term.rule.min_bytes
        if term.kind in (Kind.BOTH, Kind.NOT):
            assert term.shortest is not None
            return len(term.shortest)
        lengths = [i.shortest_length for i in term.items if i.shortest_length is not None]
        if term.kind == Kind.SEQUENCE:
            return sum(lengths)
        return lengths[0] * term.low if term.kind == Kind.REPEAT else min(lengths)

    def _shortest(self, term: Term) -> bytes:
        if term.nullable:
            return b""
        if term.kind == Kind.BYTES:
            return bytes([_plainest(term.bits)])
        if term.kind == Kind.WORDS:
            assert term.words is not None
            return min(term.words.words[term.low : term.high], key=len)[term.depth :]
        if term.kind in (Kind.BOTH, Kind.NOT):
            assert term.shortest is not None
            return term.shortest
        texts = [item.shortest for item in term.items if item.shortest is not None]
        if term.kind == Kind.SEQUENCE:
            return b"".join(texts)
        return texts[0] * term.low if term.kind == Kind.REPEAT else min(texts, key=len)

    def _search_shortest(self, term: Term) -> bytes:
        """Breadth-first over the derivatives; every term on the way learns its own answer."""
        _, known = self._without_counters(term)
        if known is not None:
            term.shortest = known
            return known
        reached_from: dict[Term, tuple[Term, int]] = {}
        seen = {term}
        queue = deque([term])
        while queue:
            here = queue.popleft()
            self.spend()
            if here.nullable:
                text = b""
                here.shortest = text
                while here is not term:
                    here, byte = reached_from[here]
                    text = bytes([byte]) + text
                    here.shortest = text
                return text
            for bits, after in self.parts(here):
                if after not in seen:
                    seen.add(after)
                    reached_from[after] = (here, _plainest(bits))
                    queue.append(after)
        raise AssertionError("an empty term has no shortest string")

    def detour(self, term: Term) -> int | None:
        """At most how many bytes complete a regular term from anywhere inside it.

        Read off the shape, or else by a search; None if that would be long.
        """
        if term.detour_length is None:
            if term.is_searched:
                detour = self._searched_detour(term)
                term.detour_length = _UNKNOWN if detour is None else detour
            else:
                self._settle(term, lambda t: t.detour_length is not None, self._learn_detour)
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
                after += self.min_bytes(element)
            return longest
        if term.kind == Kind.BOTH:
            others, counters = self._split_counters(term)
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
        elif term.kind == Kind.SEQUENCE:
            term.detour_length = max(inner[0] + self.min_bytes(term.items[1]), inner[1])
        elif term.kind == Kind.REPEAT:
            others = max(term.low - 1, 0) * self.min_bytes(term.items[0])
            term.detour_length = inner[0] + others
        else:
            term.detour_length = max(inner, default=0)

    def _explored_detour(self, term: Term) -> int | None:
        """The longest of the shortest ways out, over everything that can be reached."""
        arrivals: dict[Term, list[Term]] = {term: []}
        pending = [term]
        while pending and len(arrivals) <= _EXPLORED:
            here = pending.pop()
            self.spend()
            for _, after in self.parts(here):
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

    def clamp(self, term: Term, num_bytes: int) -> Term:
        """A lexeme with the same strings' prefixes of up to `num_bytes` bytes, counters cut short.

        A counter that such a prefix cannot exhaust might as well be endless, so that states deep
        inside a long string share one mask. Only the counters of the outermost sequence are cut,
        and within an intersection only those that count any characters.
        """
        if term.kind == Kind.LEXEME:
            return self.lexeme(self.clamp(term.items[0], num_bytes))
        if term.kind == Kind.ALTERNATION:
            return self.alternation(self.clamp(item, num_bytes) for item in term.items)
        return self.sequence(*(self._clamp_element(e, num_bytes) for e in term.spine))

    def _clamp_element(self, term: Term, num_bytes: int) -> Term:
        if term.kind == Kind.BOTH:
            return self._clamp_both(term, num_bytes)
        if term.kind != Kind.REPEAT or term.items[0].nullable:
            return term
        high = term.high if term.high is not None and term.high <= num_bytes else None
        return self.repeat(term.items[0], min(term.low, num_bytes + 1), high)

    def _clamp_both(self, term: Term, num_bytes: int) -> Term:
        """What else is asked for can be completed within `detour` characters, wherever a prefix
        ends. A maximum that is further off than that can neither be met nor make it impossible.
        """
        others, counters = self._split_counters(term)
        detour = self.detour(others) if counters and others is not None else None
        if detour is None or others is None:
            return term
        return self.both(others, *(self._without_end(c, num_bytes + detour) for c in counters))

    def without_exclusion(self, lexeme: Term) -> Term | None:
        """The lexeme as it would be if a finite number of words were not excluded from it.

        None if there is no such exclusion. A prefix that can be completed with them can be
        completed without them: any characters may follow, so some lead away from all of them.
        """
        elements = lexeme.items[0].spine if lexeme.kind == Kind.LEXEME else []
        searched = [i for i, element in enumerate(elements) if element.is_searched]
        if len(searched) != 1 or elements[searched[0]].kind != Kind.BOTH:
            return None
        others, counters = self._split_counters(elements[searched[0]])
        ends = [each.spine[-1] for counter in counters for each in counter.alternatives]
        is_open = all(end.low == 0 and end.high is None for end in ends)
        if len(counters) != 1 or others is None or not is_open or not _excludes_finitely(others):
            return None
        elements[searched[0]] = counters[0]
        return self.lexeme(self.sequence(*elements))

    def _split_counters(self, term: Term) -> tuple[Term | None, list[Term]]:
        """An intersection without its counters of characters, if anything is left, and these."""
        counters = [item for item in term.items if self._counts_characters(item)]
        others = [item for item in term.items if item not in counters]
        return self.both(*others) if others else None, counters

    def _counts_characters(self, term: Term) -> bool:
        """Whether it is a counter of any characters, perhaps in the middle of one."""
        return all(
            elements[-1].kind == Kind.REPEAT
            and elements[-1].items[0] in self._characters
            and all(each in self._parts_of_characters() for each in elements[:-1])
            for elements in (each.spine for each in term.alternatives)
        )

    def _without_end(self, term: Term, far: int) -> Term:
        if term.kind == Kind.ALTERNATION:
            return self.alternation(self._without_end(item, far) for item in term.items)
        *before, counter = term.spine
        if counter.high is not None and counter.high >= far:
            counter = self.repeat(counter.items[0], counter.low, None)
        return self.sequence(*before, counter)

    def mark_character(self, term: Term) -> Term:
        """Say that the term is one character, whichever it is."""
        self._characters.add(term)
        self._character_parts = None
        return term

    def _parts_of_characters(self) -> set[Term]:
        """The elements of what is left of a character once it has begun."""
        if self._character_parts is None:
            known: set[Term] = set()
            pending = list(self._characters)
            while pending:
                for _, after in self.form(pending.pop()):
                    for each in after.spine:
                        if each not in known:
                            known.add(each)
                            pending.append(each)
            self._character_parts = known
        return self._character_parts

    def digest(self, term: Term) -> bytes:
        """Equal for regular terms of equal structure, also of other stores."""

        def is_known(each: Term) -> bool:
            return each.digest is not None

        def learn(each: Term) -> None:
            each.digest = self._digest(each)

        self._settle(term, is_known, learn)
        assert term.digest is not None
        return term.digest

    def _digest(self, term: Term) -> bytes:
        head = f"{term.kind:d},{term.bits:x},{term.low},{term.high},{term.depth}".encode()
        if term.kind == Kind.WORDS:
            assert term.words is not None
            words = term.words.words[term.low : term.high]
            if len(words) <= 16:
                return _digest(b"suffixes", *(word[term.depth :] for word in words))
            return _digest(head, term.words.digest)
        items = [item.digest or b"" for item in term.items]
        if term.kind in (Kind.ALTERNATION, Kind.BOTH):
            items.sort()
        return _digest(head, *items)


def _excludes_finitely(term: Term) -> bool:
    return term.kind == Kind.NOT and term.items[0].is_finite


def _digest(*fields: bytes) -> bytes:
    state = blake2b(digest_size=16)
    for each in fields:
        state.update(len(each).to_bytes(4, "little"))
        state.update(each)
    return state.digest()


def _plainest(bits: int) -> int:
    """A byte of the set that a reader would expect: a letter, a digit, something printable."""
    for preferred in _PLAIN:
        if bits & preferred:
            bits &= preferred
            break
    return (bits & -bits).bit_length() - 1


def bits_of(values: Iterable[int]) -> int:
    """The set of byte values as bits."""
    bits = 0
    for value in values:
        bits |= 1 << value
    return bits


_PLAIN: Sequence[int] = (
    bits_of(b"abcdefghijklmnopqrstuvwxyz"),
    bits_of(b"0123456789"),
    bits_of(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    bits_of(range(0x21, 0x7F)) & ~bits_of(b'\\"'),
)
