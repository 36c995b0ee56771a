"""Makes terms, keeps equal ones equal, derives them, and answers questions about them."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from heapq import heappop, heappush

from palmette.grammar.clock import begin_work, work_seconds
from palmette.grammar.distinct import distinct_items, distinct_names
from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.limits import Limits
from palmette.grammar.moves import ArrayMoves, ObjectMoves, Where, without_unspelled
from palmette.grammar.patience import current_patience
from palmette.grammar.recipes import Recipe, follow, recipe_of
from palmette.grammar.structures import Items, Members
from palmette.grammar.terms import (
    ALL_BYTES,
    UNFOLDED,
    Form,
    Kind,
    Pair,
    Rule,
    Table,
    Term,
    WordList,
    plainest,
)
from palmette.grammar.unfold import (
    after_text,
    derive_capture,
    lenient,
    member_min_bytes,
    rest_of_member,
    shortest_steps,
    step,
    unfold,
)

_SHORT_WORD = 256
_WORK_PER_LOOK = 256
_SECONDS_BETWEEN_LOOKS = 0.0005
_BYTES_PER_TERM = 1024
_FEW = 8  # a term of ordinary size has no more items or moves
# Texts of terms on the way to a long one are as many bytes together as its length squared.
_LONGEST_ON_THE_WAY = 4096

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
        self.held = 0  # bytes, see `hold`
        self._rules: dict[_Key, Rule] = {}
        self._moves: dict[Items[Term] | Members[Term], ArrayMoves[Term] | ObjectMoves[Term]] = {}
        self._derived: list[Term] = []
        self._characters: set[Term] = set()
        self._character_parts: set[Term] | None = None
        self._deadline: float | None = None
        self._looked_at = 0.0
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

    @property
    def load(self) -> int:
        """About how much memory was taken since the store was cleared, in ordinary terms.

        A term may have many alternatives, moves or texts.
        """
        return len(self._interned) + self.held // _BYTES_PER_TERM

    def hold(self, num_bytes: int) -> None:
        """Count memory that terms take beyond the ordinary."""
        self.held += num_bytes

    def clear(self) -> None:
        """Forget what is interned and derived. Terms in use stay valid; new equal ones differ."""
        for term in self._derived:
            term.form = term.parts = None
            term.form_sets = term.part_sets = ()
        self._derived.clear()
        self._interned.clear()
        self.held = 0
        self._rules.clear()
        self._moves.clear()
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

    def share_clock(self, other: TermStore) -> None:
        """What follows in this thread has no more than is left of the time of `other`."""
        if other._deadline is None:
            other.look()
        self._seconds, self._deadline, self._work = other._seconds, other._deadline, 0
        self._looked_at = other._looked_at

    def spend(self, work: int = 1) -> None:
        """Count work, and look now and then."""
        self._work += work
        if self._work >= _WORK_PER_LOOK:
            self.look()

    def look(self) -> None:
        """Look at the clock, which begins to run if it has not, and at what the terms take."""
        self._work = 0
        self.check_size()
        # Processor time passes no faster than this, which costs far less to read.
        wall = time.perf_counter()
        if self._deadline is not None and wall - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = wall
        patience = current_patience()
        if patience is not None:
            patience.look()
        if self._deadline is None:
            self._deadline = begin_work() + self._seconds
        elif work_seconds() > self._deadline:
            raise GrammarTooComplex(f"the grammar needs more than {self._seconds:g} s of work")

    def check_size(self) -> None:
        """Raises GrammarTooComplex if the terms take more than the limits allow."""
        if self.load > self.limits.max_terms:
            raise GrammarTooComplex(
                f"the grammar needs more than {self.limits.max_terms} terms at once"
            )

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

    def table(self, accepting: Sequence[bool], moves: Sequence[Sequence[tuple[int, int]]]) -> Term:
        """What a deterministic automaton accepts from its state 0 on.

        `moves` gives for each state disjoint byte sets and where they lead.
        """
        self.spend(len(accepting))
        distances = _distances(accepting, moves, self.alphabet)
        kept = [
            [
                (bits & self.alphabet, after)
                for bits, after in each
                if bits & self.alphabet and distances[after] is not None
            ]
            for each in moves
        ]
        if distances[0] is None:
            return self.empty
        return self._row(Table(accepting, kept, [each or 0 for each in distances]), 0)

    def _row(self, table: Table, state: int) -> Term:
        if not table.moves[state]:
            return self.epsilon
        key: _Key = (Kind.TABLE, table.digest, state)
        term = self._interned.get(key)
        if term is None:
            term = Term(Kind.TABLE, table.accepting[state], depth=state, table=table)
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
        if head.kind == Kind.REPEAT and head.high is None:
            # x* x* is x*: what an ambiguous grammar would otherwise pile up.
            after = tail.items[0] if tail.kind == Kind.SEQUENCE else tail
            if after.kind == Kind.REPEAT and after.high is None and after.items == head.items:
                if head.low == 0:
                    return tail
                if after.low == 0:
                    return head if tail is after else self._pair(head, tail.items[1])
        key = (Kind.SEQUENCE, head.serial, tail.serial)
        term = self._interned.get(key)
        if term is None:
            nullable = head.nullable and tail.nullable
            term = self._keep(key, Term(Kind.SEQUENCE, nullable, items=(head, tail)))
        return term

    def alternation(self, terms: Iterable[Term]) -> Term:
        """One of the terms.

        Alternatives that begin with the same term share it: X s | X t is X (s | t), so that an
        ambiguous grammar has few stacks, as in the graph-structured ones of GLR parsers (Tomita,
        1987). Regular ones are left as they are: their automaton is small anyway.
        """
        # Each level of sharing is a generator that waits for the alternation of what follows.
        pending = [self._alternate(terms)]
        answer: Term | None = None
        while pending:
            try:
                pending.append(self._alternate(pending[-1].send(answer)))
                answer = None
            except StopIteration as done:
                answer = done.value
                pending.pop()
        assert answer is not None
        return answer

    def _alternate(self, terms: Iterable[Term]) -> Generator[list[Term], Term | None, Term]:
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
        self.spend(len(items) // 8)
        if len(items) > self.limits.max_alternatives:
            raise GrammarTooComplex(
                f"more than {self.limits.max_alternatives} alternatives at one place"
            )
        key = (Kind.ALTERNATION, *sorted(items))
        found = self._interned.get(key)
        if found is None:
            shared = yield from self._share_heads(items)
            found = self._interned[key] = self._alternation_of(shared)
        return found

    def _share_heads(
        self, items: dict[int, Term]
    ) -> Generator[list[Term], Term | None, list[Term]]:
        """The alternatives, those that begin with the same term made one."""
        if all(item.is_regular for item in items.values()):
            return [items[serial] for serial in sorted(items)]
        tails: dict[Term, list[Term]] = {}
        for item in items.values():
            head, tail = item.items if item.kind == Kind.SEQUENCE else (item, self.epsilon)
            tails.setdefault(head, []).append(tail)
        shared: dict[int, Term] = {}
        for head, ends in tails.items():
            if len(ends) == 1 or (head.is_regular and all(end.is_regular for end in ends)):
                made = [self._pair(head, end) for end in ends]
            else:
                after = yield ends
                assert after is not None
                made = [self._pair(head, after)]
            shared.update((item.serial, item) for item in made)
        return [shared[serial] for serial in sorted(shared)]

    def _alternation_of(self, items: list[Term]) -> Term:
        if len(items) == 1:
            return items[0]
        key = (Kind.ALTERNATION, *(item.serial for item in items))
        found = self._interned.get(key)
        if found is None:
            nullable = any(item.nullable for item in items)
            found = self._keep(key, Term(Kind.ALTERNATION, nullable, items=tuple(items)))
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

    def recipe(self, term: Term) -> Recipe | None:
        """How other stores make the term, which must be regular, or None if they cannot.

        This store must not have been cleared. See `recipes.Recipes`.
        """
        return recipe_of(term, self.anything, self._characters)

    def follow(self, recipe: Recipe) -> Term:
        """The term of a recipe of a store with the same alphabet."""
        return follow(recipe, self)

    def object(self, shape: Members[Term]) -> Term:
        """The objects of this shape; empty if there are none.

        What follows is derived as it is needed: a shape of thousands of members costs little.
        """
        moves = self._moves.get(shape)
        if moves is None:
            spelled = without_unspelled(shape, self)
            if spelled is None:
                return self.empty
            if spelled.has_distinct_names:
                spelled = distinct_names(spelled, self)
            moves = self._moves[shape] = ObjectMoves(spelled, self.min_bytes, self)
        if moves.min_bytes(moves.start) is None:
            return self.empty
        return self.sequence(shape.punctuation.open_object, self.at(moves, moves.start))

    def array(self, shape: Items[Term]) -> Term:
        """The arrays of this shape; empty if there are none."""
        moves = self._moves.get(shape)
        if moves is None:
            counted = distinct_items(shape, self) if shape.is_unique else shape
            moves = self._moves[shape] = ArrayMoves(counted, self.min_bytes, self)
        if moves.min_bytes(moves.start) is None:
            return self.empty
        return self.sequence(shape.punctuation.open_array, self.at(moves, moves.start))

    def at(self, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where) -> Term:
        """What may follow at a place of an object or array that can be completed."""
        key = (Kind.OBJECT, moves, where)
        found = self._interned.get(key)
        if found is None:
            kind = Kind.OBJECT if isinstance(moves, ObjectMoves) else Kind.ARRAY
            found = self._keep(key, Term(kind, False, moves=moves, where=where))
        return found

    def member(
        self, moves: ObjectMoves[Term], where: Where, low: int, high: int, depth: int
    ) -> Term:
        """A member with a key out of keys[low:high], from byte `depth` on, and what follows."""
        return rest_of_member(self, moves, where, low, high, depth)

    def keep_member(
        self, moves: ObjectMoves[Term], where: Where, low: int, high: int, depth: int
    ) -> Term:
        key = (Kind.MEMBER, moves, where, low, high, depth)
        found = self._interned.get(key)
        if found is None:
            found = Term(
                Kind.MEMBER, False, low=low, high=high, depth=depth, moves=moves, where=where
            )
            self._keep(key, found)
        return found

    def capture(
        self,
        moves: ArrayMoves[Term] | ObjectMoves[Term],
        where: Where,
        place: int,
        rest: Term,
        text: bytes,
    ) -> Term:
        """The rest of a part that must not come twice, of which `text` is read; see `unfold`."""
        if self.is_empty(rest):
            return self.empty
        if rest.kind == Kind.EPSILON:
            return after_text(self, moves, where, place, text)
        key = (Kind.CAPTURE, moves, where, place, rest.serial, text)
        found = self._interned.get(key)
        if found is None:
            found = Term(
                Kind.CAPTURE, False, items=(rest,), moves=moves, where=where, low=place, text=text
            )
            self._keep(key, found)
        return found

    def barrier(self, moves: ArrayMoves[Term] | ObjectMoves[Term], where: Where) -> Term:
        """A place at which nothing is known of what follows; see `unfold`."""
        key = (Kind.CAPTURE, moves, where)
        found = self._interned.get(key)
        if found is None:
            found = Term(Kind.CAPTURE, False, items=(self.epsilon,), moves=moves, where=where)
            self._keep(key, found)
        return found

    def lenient(self, term: Term) -> Term:
        """The term with the texts forgotten that are being read; itself if there are none."""
        return lenient(self, term)

    def step(self, term: Term, byte: int) -> Term:
        """The term after one byte; empty if it is not allowed."""
        return step(self, term, byte)

    def shortest_steps(self, term: Term) -> list[Term]:
        """An object, array, member or capture as a cheapest next part, with what follows it.

        Its shortest strings are shortest ones of the term; it needs no choice that matters. Where
        a text was forgotten (see `unfold`) there are several, and the longest of them is meant.
        """
        return shortest_steps(self, term)

    def _keep(self, key: _Key, term: Term) -> Term:
        self._interned[key] = term
        if len(term.items) > _FEW:
            self.held += 8 * (len(term.items) - _FEW)
        if term.where is not None:
            self.held += term.where.num_bytes + len(term.text)
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
            else:
                self._hold_pairs(len(pairs))
        return zip(term.part_sets, term.parts, strict=True)

    def form(self, term: Term) -> Form:
        """Byte sets, which may overlap, and for each a term that may follow, perhaps empty."""
        if term.form is None:
            self._settle_form(term)
            assert term.form is not None
        return zip(term.form_sets, term.form, strict=True)

    def _settle_form(self, term: Term) -> None:
        """Derive a term after those that its derivative is made of; stacks may be deep."""
        pending = [term]
        entered: set[Term] = set()
        while pending:
            top = pending[-1]
            if top.form is None and top not in entered:
                entered.add(top)
                below = [each for each in self._begins_with(top) if each.form is None]
                for each in below:
                    if each in entered:  # and not derived yet, so it waits for this one
                        raise _circle([t for t in pending if t in entered], each)
                pending += below
                continue
            pending.pop()
            if top.form is None:
                pairs = _merged(self._derive(top))
                self.spend(len(pairs) // 8)
                top.form_sets = tuple(bits for bits, _ in pairs)
                top.form = tuple(after for _, after in pairs)
                self._hold_pairs(len(pairs))
                self._derived.append(top)

    def _hold_pairs(self, count: int) -> None:
        if count > _FEW:
            self.held += 40 * (count - _FEW)

    def _begins_with(self, term: Term) -> Iterable[Term]:
        """The terms whose derivatives that of a sequence, alternation or call is made of."""
        kind = term.kind
        if kind == Kind.SEQUENCE:
            return term.items if term.items[0].nullable else term.items[:1]
        if kind == Kind.ALTERNATION or kind == Kind.REPEAT:
            return term.items
        if kind == Kind.CALL:
            assert term.rule is not None
            return (term.rule.body(),)
        return ()

    def _derive(self, term: Term) -> list[Pair]:
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
            pairs: list[Pair] = []
            for item in term.items:
                pairs += self.form(item)
                self.spend(len(item.form or ()) // 8)
            return pairs
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
            assert term.rule is not None
            return list(self.form(term.rule.body()))
        if kind == Kind.TABLE:
            assert term.table is not None
            moves = term.table.moves[term.depth]
            return [(bits, self._row(term.table, after)) for bits, after in moves]
        if kind in UNFOLDED:
            return list(self.form(unfold(self, term)))
        if kind == Kind.CAPTURE:
            return derive_capture(self, term)
        return []

    def _derive_words(self, term: Term) -> list[Pair]:
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

    def _derive_sequence(self, term: Term) -> list[Pair]:
        head, tail = term.items
        pairs = [(bits, self.sequence(after, tail)) for bits, after in self.form(head)]
        if head.nullable:
            pairs.extend(self.form(tail))
        return pairs

    def _derive_both(self, term: Term) -> list[Pair]:
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

    def _determinise(self, form: Form) -> list[Pair]:
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
        return _merged(
            (bits, afters[0] if len(afters) == 1 else self.alternation(afters))
            for bits, afters in parts
        )

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
        others, counters = self.split_counters(term)
        if not counters or others is None:
            return False, None
        if self.is_empty(others):
            return True, None
        text = self.shortest(others)
        return False, text if all(self.accepts(counter, text) for counter in counters) else None

    def accepts(self, term: Term, text: bytes) -> bool:
        """Whether the string is in the term."""
        self.spend(1 + len(text) // 16)
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
            self.held += len(each.shortest)

        if term.shortest is None:
            self._settle_non_empty(term, is_known, learn)
        assert term.shortest is not None
        return term.shortest

    def _settle_non_empty(
        self, term: Term, is_known: Callable[[Term], bool], learn: Callable[[Term], None]
    ) -> None:
        """Learn about a term and, first, about its items, except those that are empty.

        An intersection or a complement is searched instead. Nothing recurses deeply.
        """

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
            is_searched = is_searched or top.kind == Kind.CAPTURE
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
        if term.kind == Kind.MEMBER:
            return member_min_bytes(term)
        if term.kind == Kind.CAPTURE:
            return max(map(self.min_bytes, self.shortest_steps(term)))
        if term.kind in UNFOLDED:
            assert term.moves is not None
            assert term.where is not None
            num_bytes = term.moves.min_bytes(term.where)
            assert num_bytes is not None
            return num_bytes
        if term.kind == Kind.TABLE:
            return term.floor
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
            return bytes([plainest(term.bits)])
        if term.kind == Kind.WORDS:
            assert term.words is not None
            return min(term.words.words[term.low : term.high], key=len)[term.depth :]
        if term.kind in (Kind.BOTH, Kind.NOT):
            assert term.shortest is not None
            return term.shortest
        if term.kind == Kind.TABLE:
            return _shortest_of_table(term)
        texts = [item.shortest for item in term.items if item.shortest is not None]
        if term.kind == Kind.SEQUENCE:
            return b"".join(texts)
        return texts[0] * term.low if term.kind == Kind.REPEAT else min(texts, key=len)

    def _search_shortest(self, term: Term) -> bytes:
        """Breadth-first over the derivatives; the terms on the way learn their own answers too."""
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
                backwards = bytearray()
                while True:
                    here.shortest_length = len(backwards)
                    if here is term or len(backwards) <= _LONGEST_ON_THE_WAY:
                        here.shortest = bytes(reversed(backwards))
                        self.held += len(backwards)
                    if here is term:
                        return bytes(reversed(backwards))
                    here, byte = reached_from[here]
                    backwards.append(byte)
            for bits, after in self.parts(here):
                if after not in seen:
                    seen.add(after)
                    reached_from[after] = (here, plainest(bits))
                    queue.append(after)
        raise AssertionError("an empty term has no shortest string")

    def split_counters(self, term: Term) -> tuple[Term | None, list[Term]]:
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


def _distances(
    accepting: Sequence[bool], moves: Sequence[Sequence[tuple[int, int]]], alphabet: int
) -> list[int | None]:
    """For each state of an automaton the bytes that complete it; None if nothing does."""
    arrivals: list[list[int]] = [[] for _ in accepting]
    for state, each in enumerate(moves):
        for bits, after in each:
            if bits & alphabet:
                arrivals[after].append(state)
    distances: list[int | None] = [0 if each else None for each in accepting]
    level = [state for state, each in enumerate(accepting) if each]
    num_bytes = 0
    while level:
        num_bytes += 1
        reached = dict.fromkeys(before for state in level for before in arrivals[state])
        level = [state for state in reached if distances[state] is None]
        for state in level:
            distances[state] = num_bytes
    return distances


def _shortest_of_table(term: Term) -> bytes:
    assert term.table is not None
    table, state = term.table, term.depth
    text = bytearray()
    while not table.accepting[state]:
        bits, state = min(table.moves[state], key=lambda move: table.distances[move[1]])
        text.append(plainest(bits))
    return bytes(text)


def _merged(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs, each term once."""
    merged: dict[Term, int] = {}
    for bits, after in pairs:
        merged[after] = merged.get(after, 0) | bits
    return [(bits, after) for after, bits in merged.items()]


def _circle(path: list[Term], start: Term) -> GrammarTooComplex:
    rules = [term.rule for term in path[path.index(start) :] if term.rule is not None]
    return GrammarTooComplex(f"{rules[0].name} begins with itself")
