"""The algebra of languages: hash-consed terms over bytes, and their derivatives.

A term is a set of byte strings. Regular terms are built from byte sets, word lists, sequences,
alternations, counted repetitions, intersections and complements; a `Rule` that is called makes a
grammar context-free, and so do objects and arrays (see `structures`). Terms are derived lazily
(Brzozowski, *Derivatives of Regular Expressions*, 1964; Antimirov's linear forms, 1996), so a
counter of ten thousand costs nothing until it is walked, and nothing is ever unrolled.

A *lexeme* is a regular part that is determinised by itself, such as the body of a JSON string. It
looks the same wherever it stands, which is what lets masks be shared between places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palmette.grammar.moves import ArrayMoves, ObjectMoves, Where

ALL_BYTES = (1 << 256) - 1


serials = count(1)


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
    TABLE = 11  # what `table` accepts from its state `depth` on
    OBJECT = 12  # what may follow at a place between two members; see `unfold`
    ARRAY = 13  # the same between two items
    MEMBER = 14  # what is left of a declared member whose key has begun, and all that follows
    CAPTURE = 15  # items[0], what is left of a part that must not come twice, and all that follows


# Made of parts that are found when they are needed; never empty, nor regular for the store.
UNFOLDED = frozenset((Kind.OBJECT, Kind.ARRAY, Kind.MEMBER))
CONTEXT_FREE = UNFOLDED | {Kind.CALL, Kind.CAPTURE}


class WordList:
    """A sorted list of distinct words."""

    __slots__ = ("digest", "serial", "words")

    def __init__(self, words: Iterable[bytes]) -> None:
        self.words = sorted(set(words))
        self.serial = next(serials)
        self.digest = digest_of(b"words", *self.words)


class Table:
    """A deterministic automaton; a string may end in a state that is `accepting`.

    `moves` gives for each state disjoint byte sets and where they lead. Every state can be
    completed; `distances` tells in how many bytes at least.
    """

    __slots__ = ("accepting", "digest", "distances", "moves")

    def __init__(
        self,
        accepting: Sequence[bool],
        moves: Sequence[Sequence[tuple[int, int]]],
        distances: Sequence[int],
    ) -> None:
        self.accepting = tuple(accepting)
        self.moves = tuple(map(tuple, moves))
        self.distances = tuple(distances)
        self.digest = digest_of(b"table", repr(self.accepting).encode(), repr(self.moves).encode())


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

    Of parts that must not come twice: `is_capturing` marks a term that takes note of the next
    bytes, `is_exact` one that knows all the texts that came, `is_barrier` one that may go on with a
    part of which it is not known whether it has come; see `unfold.lenient`.
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
        "is_barrier",
        "is_capturing",
        "is_exact",
        "is_finite",
        "is_regular",
        "is_searched",
        "items",
        "kind",
        "known_empty",
        "low",
        "moves",
        "nullable",
        "part_sets",
        "parts",
        "rule",
        "serial",
        "shortest",
        "shortest_length",
        "table",
        "text",
        "where",
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
        table: Table | None = None,
        moves: ArrayMoves[Term] | ObjectMoves[Term] | None = None,
        where: Where | None = None,
        text: bytes = b"",
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
        self.table = table
        self.moves = moves
        self.where = where
        self.text = text
        self.serial = next(serials)
        self.is_searched: bool = kind in (Kind.BOTH, Kind.NOT) or (
            kind != Kind.CAPTURE and any(i.is_searched for i in items)
        )
        self.is_regular: bool = kind not in CONTEXT_FREE and all(i.is_regular for i in items)
        self.is_finite: bool = (
            kind not in (Kind.NOT, Kind.TABLE)
            and kind not in CONTEXT_FREE
            and not (kind == Kind.REPEAT and high is None)
            and all(i.is_finite for i in items)
        )
        self.is_capturing = self.is_exact = self.is_barrier = False
        if not self.is_regular:
            self._mark_texts()
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

    def _mark_texts(self) -> None:
        if self.where is not None and self.moves is not None:
            if self.moves.is_distinct:
                forgotten, is_capture = self.where.forgotten, self.kind == Kind.CAPTURE
                self.is_exact = forgotten is None
                self.is_capturing = is_capture and forgotten is None
                self.is_barrier = is_capture and forgotten == 1
        elif self.kind in (Kind.SEQUENCE, Kind.ALTERNATION):
            is_all = self.kind == Kind.ALTERNATION or self.items[0].nullable
            for item in self.items if is_all else self.items[:1]:
                self.is_exact |= item.is_exact
                self.is_capturing |= item.is_capturing
                self.is_barrier |= item.is_barrier

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
        if self.kind == Kind.TABLE:
            assert self.table is not None
            return self.table.distances[self.depth]
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
Pair = tuple[int, Term]
Form = Iterable[Pair]


def digest_of(*fields: bytes) -> bytes:
    state = blake2b(digest_size=16)
    for each in fields:
        state.update(len(each).to_bytes(4, "little"))
        state.update(each)
    return state.digest()


def plainest(bits: int) -> int:
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
