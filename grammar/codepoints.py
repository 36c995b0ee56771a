"""Sets of Unicode code points. Surrogates are in none of them: they are no characters."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_Range = tuple[int, int]

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
        return ~(~self | ~other)

    def __sub__(self, other: CodePoints) -> CodePoints:
        return self & ~other

    def __contains__(self, code_point: int) -> bool:
        return any(low <= code_point <= high for low, high in self.ranges)

    def between(self, low: int, high: int) -> list[_Range]:
        """The ranges cut to `low..high`."""
        return [(max(a, low), min(b, high)) for a, b in self.ranges if a <= high and b >= low]


ANY = CodePoints.of([(0, _LAST)])
DIGITS = CodePoints.characters("0123456789")
WORD = CodePoints.of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
# White space and line terminators of ECMA-262, sections 12.2 and 12.3.
SPACE = CodePoints.characters("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff") | (
    CodePoints.of([(0x2000, 0x200A)])
)
LINE_ENDS = CodePoints.characters("\n\r\u2028\u2029")
NOT_LINE_ENDS = ~LINE_ENDS

_LONG_NAMES = {
    "letter": "L",
    "cased_letter": "LC",
    "uppercase_letter": "Lu",
    "lowercase_letter": "Ll",
    "titlecase_letter": "Lt",
    "modifier_letter": "Lm",
    "other_letter": "Lo",
    "mark": "M",
    "number": "N",
    "decimal_number": "Nd",
    "digit": "Nd",
    "punctuation": "P",
    "symbol": "S",
    "separator": "Z",
}
_CATEGORIES = frozenset(
    [
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "Mn",
        "Mc",
        "Me",
        "Nd",
        "Nl",
        "No",
        "Pc",
        "Pd",
        "Ps",
        "Pe",
        "Pi",
        "Pf",
        "Po",
        "Sm",
        "Sc",
        "Sk",
        "So",
        "Zs",
        "Zl",
        "Zp",
        "Cc",
        "Cf",
        "Co",
        "Cn",
    ]
)


@lru_cache(maxsize=64)
def general_category(name: str) -> CodePoints | None:
    """The characters of a general category (``Lu``, ``L``, ``Letter``), or None if there is none.

    By the Unicode version of this Python.
    """
    name = _LONG_NAMES.get(name.lower(), name)
    if name == "LC":
        wanted = frozenset({"Lu", "Ll", "Lt"})
    elif len(name) == 1:
        wanted = frozenset(c for c in _CATEGORIES if c[0] == name)
    else:
        wanted = _CATEGORIES & {name}
    if not wanted:
        return None
    ranges: list[_Range] = []
    start = None
    for code_point in range(_LAST + 2):
        inside = code_point <= _LAST and unicodedata.category(chr(code_point)) in wanted
        if inside and start is None:
            start = code_point
        elif not inside and start is not None:
            ranges.append((start, code_point - 1))
            start = None
    return CodePoints.of(ranges)
