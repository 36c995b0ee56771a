"""Sets of Unicode code points. Surrogates are in none of them: they are no characters."""

from __future__ import annotations

import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

_Range = tuple[int, int]
_T = TypeVar("_T")

_LAST = sys.maxunicode
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class CodePoints:
    """Sorted, disjoint, non-adjacent ranges, both ends included."""

    ranges: tuple[_Range, ...]

    @classmethod
    def of(cls, ranges: Iterable[_Range]) -> CodePoints:
        """The union of ranges in any order, without the surrogates."""
        merged: list[_Range] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        first, last = _SURROGATES
        clean: list[_Range] = []
        for low, high in merged:
            if low < first:
                clean.append((low, min(high, first - 1)))
            if high > last:
                clean.append((max(low, last + 1), high))
        return cls(tuple(clean))

    @classmethod
    def characters(cls, text: str) -> CodePoints:
        """Each character of `text`."""
        return cls.of((ord(c), ord(c)) for c in text)

    def __or__(self, other: CodePoints) -> CodePoints:
        return CodePoints.of(self.ranges + other.ranges)

    def __invert__(self) -> CodePoints:
        gaps = []
        start = 0
        for low, high in self.ranges:
            if start < low:
                gaps.append((start, low - 1))
            start = high + 1
        if start <= _LAST:
            gaps.append((start, _LAST))
        return CodePoints.of(gaps)

    def __and__(self, other: CodePoints) -> CodePoints:
        mine, others = self.ranges, other.ranges
        common: list[_Range] = []
        i = j = 0
        while i < len(mine) and j < len(others):
            low = max(mine[i][0], others[j][0])
            high = min(mine[i][1], others[j][1])
            if low <= high:
                common.append((low, high))
            if mine[i][1] < others[j][1]:
                i += 1
            else:
                j += 1
        return CodePoints(tuple(common))

    def __sub__(self, other: CodePoints) -> CodePoints:
        return self & ~other

    def __contains__(self, code_point: int) -> bool:
        at = bisect_right(self.ranges, (code_point, _LAST + 1)) - 1
        return at >= 0 and code_point <= self.ranges[at][1]

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __len__(self) -> int:
        return sum(high - low + 1 for low, high in self.ranges)

    def between(self, low: int, high: int) -> list[_Range]:
        """The ranges cut to `low..high`."""
        return [(max(a, low), min(b, high)) for a, b in self.ranges if a <= high and b >= low]

    def any_case(self, *, like_python: bool = False) -> CodePoints:
        """These characters and those that differ from one of them only in case.

        By simple case folding, as in ECMA-262 with the flags i and u; or as in Python's `re`,
        where ``i`` also matches the dotless one.
        """
        return _any_case(self, like_python)


@lru_cache(maxsize=256)
def _any_case(characters: CodePoints, like_python: bool) -> CodePoints:
    variants = _case_variants(like_python)
    if len(characters) < len(variants):
        cased = [c for low, high in characters.ranges for c in range(low, high + 1)]
    else:
        cased = [c for c in variants if c in characters]
    others = {other for c in cased for other in variants.get(c, ())}
    return characters | CodePoints.of((other, other) for other in others)


@lru_cache(maxsize=2)
def _case_variants(like_python: bool) -> dict[int, tuple[int, ...]]:
    """For each character that has other cases, all of them."""
    key = _python_case if like_python else _folded
    groups: dict[str, list[int]] = {}
    for code_point in range(_CASED):
        character = chr(code_point)
        folded = key(character)
        if folded != character:
            groups.setdefault(folded, [ord(folded)]).append(code_point)
    return {member: tuple(group) for group in groups.values() for member in group}


def _folded(character: str) -> str:
    """Simple case folding (Unicode, CaseFolding.txt, statuses C and S)."""
    folded = _LATE_FOLDS.get(character) or character.casefold()
    if len(folded) == 1:
        return folded
    lower = character.lower()  # where full folding is longer than a character
    return lower if len(lower) == 1 else character


def _python_case(character: str) -> str:
    """Python's `re` compares lower cases, and takes those with the same upper case as equal."""
    lower = character.lower()
    if len(lower) != 1:
        lower = lower[0]  # the simple mapping, which the full one begins with
    upper = lower.upper()
    if len(upper) != 1:
        return lower
    again = upper.lower()
    return again if len(again) == 1 else lower


_CASED = 0x20000  # no letter of the planes from the second on has a case
# Folds that Unicode has given since its version 15.1.
_LATE_FOLDS = {"\u1fd3": "\u0390", "\u1fe3": "\u03b0", "\ufb05": "\ufb06"}

ANY = CodePoints.of([(0, _LAST)])
DIGITS = CodePoints.characters("0123456789")
WORD = CodePoints.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
# White space and line terminators of ECMA-262, sections 12.2 and 12.3.
SPACE = CodePoints.characters("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | (
    CodePoints.of([(0x2000, 0x200A)])
)
ASCII_SPACE = CodePoints.characters("\t\n\v\f\r ")
LINE_ENDS = CodePoints.characters("\n\r\u2028\u2029")
NOT_LINE_ENDS = ~LINE_ENDS

_LONG_NAMES = {
    "cased_letter": "LC",
    "close_punctuation": "Pe",
    "cntrl": "Cc",
    "combining_mark": "M",
    "connector_punctuation": "Pc",
    "control": "Cc",
    "currency_symbol": "Sc",
    "dash_punctuation": "Pd",
    "decimal_number": "Nd",
    "digit": "Nd",
    "enclosing_mark": "Me",
    "final_punctuation": "Pf",
    "format": "Cf",
    "initial_punctuation": "Pi",
    "letter": "L",
    "letter_number": "Nl",
    "line_separator": "Zl",
    "lowercase_letter": "Ll",
    "mark": "M",
    "math_symbol": "Sm",
    "modifier_letter": "Lm",
    "modifier_symbol": "Sk",
    "nonspacing_mark": "Mn",
    "number": "N",
    "open_punctuation": "Ps",
    "other": "C",
    "other_letter": "Lo",
    "other_number": "No",
    "other_punctuation": "Po",
    "other_symbol": "So",
    "paragraph_separator": "Zp",
    "private_use": "Co",
    "punct": "P",
    "punctuation": "P",
    "separator": "Z",
    "space_separator": "Zs",
    "spacing_mark": "Mc",
    "surrogate": "Cs",
    "symbol": "S",
    "titlecase_letter": "Lt",
    "unassigned": "Cn",
    "uppercase_letter": "Lu",
}


@lru_cache(maxsize=1)
def _categories() -> dict[str, CodePoints]:
    """The characters of each general category, by the Unicode version of this Python."""
    ranges: dict[str, list[_Range]] = {"Cs": []}
    for category, run in _runs(unicodedata.category):
        ranges.setdefault(category, []).append(run)
    return {category: CodePoints.of(each) for category, each in ranges.items()}


@lru_cache(maxsize=128)
def general_category(name: str) -> CodePoints | None:
    """The characters of a general category (``Lu``, ``L``, ``Letter``), or None if there is none.

    By the Unicode version of this Python.
    """
    name = _LONG_NAMES.get(name.lower(), name)
    wanted = {"Lu", "Ll", "Lt"} if name == "LC" else {c for c in _categories() if c == name}
    if len(name) == 1:
        wanted = {c for c in _categories() if c[0] == name}
    if not wanted:
        return None
    return CodePoints.of(each for c in wanted for each in _categories()[c].ranges)


@lru_cache(maxsize=16)
def binary_property(name: str) -> CodePoints | None:
    """The characters with a property that this Python knows exactly, or None."""
    if name in _FIXED:
        return _FIXED[name]
    if name == "Assigned":
        return ~_categories()["Cn"]
    test = _TESTS.get(name)
    return None if test is None else _where(test)


PYTHON_DIGITS: Callable[[], CodePoints] = lru_cache(maxsize=1)(lambda: _where(str.isdecimal))
PYTHON_SPACE: Callable[[], CodePoints] = lru_cache(maxsize=1)(lambda: _where(str.isspace))
PYTHON_WORD: Callable[[], CodePoints] = lru_cache(maxsize=1)(
    lambda: _where(str.isalnum) | CodePoints.characters("_")
)


def _where(test: Callable[[str], bool]) -> CodePoints:
    return CodePoints.of(run for inside, run in _runs(test) if inside)


def _runs(describe: Callable[[str], _T]) -> Iterator[tuple[_T, _Range]]:
    """All characters, in runs of which `describe` says the same."""
    start = 0
    for said, run in groupby(map(describe, map(chr, range(_LAST + 1)))):
        end = start + sum(1 for _ in run)
        yield said, (start, end - 1)
        start = end


_HEX = [(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]
_FIXED = {
    "Any": ANY,
    "ASCII": CodePoints.of([(0, 0x7F)]),
    "ASCII_Hex_Digit": CodePoints.of(_HEX),
    "AHex": CodePoints.of(_HEX),
    "Hex_Digit": CodePoints.of([*_HEX, (0xFF10, 0xFF19), (0xFF21, 0xFF26), (0xFF41, 0xFF46)]),
    "Hex": CodePoints.of([*_HEX, (0xFF10, 0xFF19), (0xFF21, 0xFF26), (0xFF41, 0xFF46)]),
    "White_Space": CodePoints.of(
        [
            (0x9, 0xD),
            (0x20, 0x20),
            (0x85, 0x85),
            (0xA0, 0xA0),
            (0x1680, 0x1680),
            (0x2000, 0x200A),
            (0x2028, 0x2029),
            (0x202F, 0x202F),
            (0x205F, 0x205F),
            (0x3000, 0x3000),
        ]
    ),
}
_FIXED["space"] = _FIXED["White_Space"]
_TESTS: dict[str, Callable[[str], bool]] = {
    "Lowercase": str.islower,
    "Lower": str.islower,
    "Uppercase": str.isupper,
    "Upper": str.isupper,
    "XID_Start": lambda character: character != "_" and character.isidentifier(),
    "XIDS": lambda character: character != "_" and character.isidentifier(),
    "XID_Continue": lambda character: ("_" + character).isidentifier(),
    "XIDC": lambda character: ("_" + character).isidentifier(),
}
