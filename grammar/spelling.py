"""How characters are spelled in bytes: as UTF-8, or inside a JSON string with all its escapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from palmette.grammar.codepoints import ANY, CodePoints
from palmette.grammar.recipes import RECIPES
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term, bits_of


class Spelling(Protocol):
    """Turns sets of characters into terms; different characters never share a spelling."""

    @property
    def store(self) -> TermStore: ...

    def one_of(self, characters: CodePoints) -> Term:
        """One character of the set, in any of its spellings."""
        ...

    def texts(self, texts: Iterable[str]) -> Term:
        """One of the texts, in any of their spellings; texts with lone surrogates have none."""
        ...


class _Digit(NamedTuple):
    """One place of a positional notation."""

    base: int
    bits: Callable[[int, int], int]  # the bytes that write the digits low..high
    prefix: bytes = b""


class Utf8:
    """Plain text. Only well-formed UTF-8 (RFC 3629): no surrogates, no overlong forms."""

    def __init__(self, store: TermStore) -> None:
        self.store = store
        self._known: dict[CodePoints, Term] = {}
        self._written: dict[_Written, Term] = {}

    def one_of(self, characters: CodePoints) -> Term:
        term = self._known.get(characters)
        if term is None:
            forms = [_term(self.store, each, self._written) for each in _utf8(characters)]
            term = self._known[characters] = self.store.alternation(forms)
        return term

    def texts(self, texts: Iterable[str]) -> Term:
        """One of the texts; texts with lone surrogates have no spelling."""
        return self.store.words(text.encode() for text in texts if not _SURROGATE.search(text))


# How freely the characters of a JSON string may be escaped, see `JsonString`.
Escapes = Literal["any", "plain", "canonical"]


class JsonString:
    """The inside of a JSON string (RFC 8259, section 7).

    Any text has a spelling, whatever the `escapes`; these only say how many:

    - `any`: a character stands for itself, or is written in any escape that stands for it, one
      beyond U+FFFF in a pair of surrogate escapes, which counts as the one character it is.
    - `plain`: the same, but printable ASCII is not escaped where it can stand for itself. So what a
      pattern spells out is written in one way.
    - `canonical`: each character in one way only, escaped only where it must be.

    A lone surrogate is no character and is never allowed.
    """

    def __init__(self, store: TermStore, *, escapes: Escapes = "any") -> None:
        self.store = store
        self.escapes = escapes
        self._known: dict[CodePoints, Term] = {}
        store.mark_character(self.one_of(ANY))

    def one_of(self, characters: CodePoints) -> Term:
        term = self._known.get(characters)
        if term is None:
            term = self._known[characters] = self._spell(characters)
        return term

    def _spell(self, characters: CodePoints) -> Term:
        ranges = characters.ranges
        if len(ranges) > _FEW_RANGES:
            return self._made(self.store, _forms(characters, self.escapes))
        forms = _few_forms(characters, self.escapes)
        if not forms.written:
            return self._made(self.store, forms)
        key = ("characters", ranges, self.escapes)
        return RECIPES.term(self.store, key, lambda kitchen: self._made(kitchen, forms))

    def _made(self, store: TermStore, forms: _Forms) -> Term:
        written: dict[_Written, Term] = {}
        terms = [_term(store, each, written) for each in forms.written]
        terms.append(store.words(forms.words))
        if forms.short:
            terms.append(store.sequence(_bytes(store, b"\\"), store.byte_set(forms.short)))
        return store.alternation(terms)

    def texts(self, texts: Iterable[str]) -> Term:
        """One of the texts, in any of their spellings; texts with lone surrogates have none."""
        store = self.store
        texts = set(texts)
        if self.escapes != "any" and not _NOT_PLAIN.search("".join(texts)):  # as names mostly are
            store.spend(len(texts))
            return store.words(text.encode() for text in texts)
        spellable = [text for text in texts if not _SURROGATE.search(text)]
        store.spend(len(spellable))
        if self.escapes == "canonical":
            return store.words(map(self.plainest, spellable))
        if self.escapes == "plain":
            several = [text for text in spellable if _NOT_PLAIN.search(text)]
            if len(several) < len(spellable):
                one = store.words(
                    text.encode() for text in spellable if not _NOT_PLAIN.search(text)
                )
                return store.alternation((one, self._texts(several))) if several else one
            spellable = several
        return self._texts(spellable)

    def _texts(self, texts: Sequence[str]) -> Term:
        """Texts with a common beginning share it: the open path of a trie, closed from its end."""
        store = self.store
        path: list[tuple[str, list[Term]]] = [("", [])]

        def close_to(depth: int) -> None:
            while len(path) > depth + 1:
                character, branches = path.pop()
                one = self.one_of(_only(character))
                path[-1][1].append(store.sequence(one, store.alternation(branches)))

        previous = ""
        for text in sorted(texts):
            common = 0
            while common < min(len(text), len(previous)) and text[common] == previous[common]:
                common += 1
            close_to(common)
            path += [(character, []) for character in text[common:]]
            path[-1][1].append(store.epsilon)
            previous = text
        close_to(0)
        return store.alternation(path[0][1])

    def plainest(self, text: str) -> bytes:
        """The text with the fewest escapes; it must have no lone surrogate."""
        return b"".join(
            _plainest(ord(each)) if ord(each) in _NEEDS_ESCAPE else each.encode() for each in text
        )

    def quoted(self, content: Term) -> Term:
        """A whole JSON string with that content, as a lexeme."""
        quote = _bytes(self.store, b'"')
        return self.store.lexeme(self.store.sequence(quote, content, quote))


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Numbers in the digits of a notation, from some place on: byte sets and what follows each.

    No steps: nothing more is to be written.
    """

    steps: tuple[tuple[bytes, int, _Written], ...]


_Ranges = tuple[tuple[int, int], ...]
_END = _Written(())
_FEW_RANGES = 32  # of a set that is remembered


def _written(ranges: _Ranges, place: int, digits: tuple[_Digit, ...]) -> _Written:
    """The numbers in `ranges`, in the digits from `place` on; sorted, disjoint, not empty."""
    if place == len(digits):
        return _END
    if len(ranges) > _FEW_RANGES:
        return _write(ranges, place, digits)
    return _remembered(ranges, place, digits)


@lru_cache(maxsize=4096)
def _remembered(ranges: _Ranges, place: int, digits: tuple[_Digit, ...]) -> _Written:
    return _write(ranges, place, digits)


def _write(ranges: _Ranges, place: int, digits: tuple[_Digit, ...]) -> _Written:
    unit = 1
    for digit in digits[place + 1 :]:
        unit *= digit.base
    after: dict[int, list[tuple[int, int]]] = {}  # for each digit, what may follow
    full = (0, unit - 1)
    for low, high in ranges:
        for value in range(low // unit, high // unit + 1):
            start = value * unit
            rest = (max(low - start, 0), min(high - start, unit - 1))
            after.setdefault(value, []).append(rest if unit > 1 else full)
    values: dict[_Ranges, int] = {}
    here = digits[place]
    for value, rests in after.items():
        key = tuple(rests)
        values[key] = values.get(key, 0) | here.bits(value, value)
    return _Written(
        tuple(
            (here.prefix, bits, _written(rests, place + 1, digits))
            for rests, bits in values.items()
        )
    )


def _term(store: TermStore, written: _Written, known: dict[_Written, Term]) -> Term:
    if written is _END:
        return store.epsilon
    term = known.get(written)
    if term is None:
        term = known[written] = store.alternation(
            [
                store.sequence(
                    *(_bytes(store, prefix[i : i + 1]) for i in range(len(prefix))),
                    store.byte_set(bits),
                    _term(store, rest, known),
                )
                for prefix, bits, rest in written.steps
            ]
        )
    return term


def _utf8(characters: CodePoints) -> Iterator[_Written]:
    """The characters as UTF-8, by the number of bytes."""
    for low, high, digits in _UTF8_FORMS:
        ranges = characters.between(low, high)
        if ranges:
            yield _written(tuple(ranges), 0, digits)


class _Forms(NamedTuple):
    """How a set of characters is written inside a JSON string."""

    written: tuple[_Written, ...]
    words: frozenset[bytes] = frozenset()
    short: int = 0  # the bytes that may follow a backslash


def _forms(characters: CodePoints, escapes: Escapes) -> _Forms:
    if escapes == "canonical":
        escaped = characters & _NEEDS_ESCAPE
        return _Forms(
            tuple(_utf8(characters - _NEEDS_ESCAPE)),
            frozenset(_plainest(c) for low, high in escaped.ranges for c in range(low, high + 1)),
        )
    if len(characters.ranges) == 1 and characters.ranges[0][0] == characters.ranges[0][1]:
        return _Forms((), _spellings(characters.ranges[0][0], escapes))
    written = list(_utf8(characters - _NEEDS_ESCAPE))
    escaped = characters if escapes == "any" else characters - _PLAIN
    basic = escaped.between(0, 0xFFFF)
    if basic:
        written.append(_written(tuple(basic), 0, _BASIC_ESCAPE))
    beyond = [(low - 0x10000, high - 0x10000) for low, high in escaped.between(0x10000, _LAST)]
    if beyond:
        written.append(_written(tuple(beyond), 0, _SURROGATE_ESCAPES))
    short = bits_of(e for c, e in _SHORT_ESCAPES.items() if c in escaped)
    return _Forms(tuple(written), short=short)


_few_forms = lru_cache(maxsize=4096)(_forms)


@lru_cache(maxsize=1024)
def _only(character: str) -> CodePoints:
    return CodePoints(((ord(character), ord(character)),))


def _plainest(code_point: int) -> bytes:
    """A character that cannot stand for itself, escaped."""
    if code_point in _SHORT_ESCAPES:
        return bytes([0x5C, _SHORT_ESCAPES[code_point]])
    return f"\\u{code_point:04x}".encode()


def _spellings(code_point: int, escapes: Escapes) -> frozenset[bytes]:
    """The ways to write one character inside a JSON string."""
    character = chr(code_point)
    spellings = {character.encode()} if code_point not in _NEEDS_ESCAPE else set()
    if escapes == "plain" and code_point in _PLAIN:
        return frozenset(spellings)
    if code_point in _SHORT_ESCAPES:
        spellings.add(bytes([0x5C, _SHORT_ESCAPES[code_point]]))
    units = character.encode("utf-16-be").hex()
    escaped = [""]
    for i, digit in enumerate(units):
        prefix = "\\u" if i % 4 == 0 else ""
        cases = {digit, digit.upper()}
        escaped = [written + prefix + case for written in escaped for case in cases]
    return frozenset(spellings) | {each.encode() for each in escaped}


def _bytes(store: TermStore, byte: bytes) -> Term:
    return store.byte_set(bits_of(byte))


def _from(first: int) -> Callable[[int, int], int]:
    return lambda low, high: bits_of(range(first + low, first + high + 1))


def _hex(first: int = 0) -> Callable[[int, int], int]:
    def bits(low: int, high: int) -> int:
        written = "".join(f"{first + value:x}" for value in range(low, high + 1))
        return bits_of((written + written.upper()).encode())

    return bits


_LAST = 0x10FFFF
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_PLAIN = re.compile(r"[^ !#-\[\]-~]")  # a character with more than one plain spelling
_NEEDS_ESCAPE = CodePoints.of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_PLAIN = CodePoints.of([(0x20, 0x7E)]) - _NEEDS_ESCAPE
_SHORT_ESCAPES = {
    ord(character): ord(escape)
    for character, escape in zip('"\\/\b\f\n\r\t', '"\\/bfnrt', strict=True)
}
_CONTINUATION = _Digit(64, _from(0x80))
_UTF8_FORMS = (
    (0, 0x7F, (_Digit(128, _from(0)),)),
    (0x80, 0x7FF, (_Digit(32, _from(0xC0)), _CONTINUATION)),
    (0x800, 0xFFFF, (_Digit(16, _from(0xE0)), _CONTINUATION, _CONTINUATION)),
    (0x10000, _LAST, (_Digit(8, _from(0xF0)), *[_CONTINUATION] * 3)),
)
_BASIC_ESCAPE = (_Digit(16, _hex(), b"\\u"), *[_Digit(16, _hex())] * 3)
_SURROGATE_ESCAPES = (
    _Digit(1, _hex(0xD), b"\\u"),
    _Digit(4, _hex(0x8)),
    *[_Digit(16, _hex())] * 2,
    _Digit(1, _hex(0xD), b"\\u"),
    _Digit(4, _hex(0xC)),
    *[_Digit(16, _hex())] * 2,
)
