"""Reads a regular expression in the syntax of ECMA-262 or of Python.

Lazy quantifiers and names of groups change nothing about what matches. What is not regular is
refused by name.

- ``ecma``: as JSON Schema asks for, with the flag u: a pattern is made of code points. The classes
  ``\\d`` and ``\\w`` are ASCII, ``\\s`` is Unicode's, the dot takes no line end, and ``$`` matches
  at the very end. Tolerated because people write it: escapes of any punctuation, octal escapes
  (``\\012``) and lone braces as in web browsers, groups and inline flags as in Python
  (``(?P<n>a)``, ``(?i)``, ``(?#c)``), ``\\A``, ``\\Z`` and ``\\z``. Flags: i, m, s.
- ``python``: as `re` reads a `str`. The classes are Unicode's unless the flag a is given, the dot
  takes anything but a line feed, and ``$`` also matches before a line feed at the end. Flags: a, i,
  m, s, u, x.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from palmette.grammar.codepoints import (
    ANY,
    ASCII_SPACE,
    DIGITS,
    LINE_ENDS,
    NOT_LINE_ENDS,
    PYTHON_DIGITS,
    PYTHON_SPACE,
    PYTHON_WORD,
    SPACE,
    WORD,
    CodePoints,
    binary_property,
    general_category,
)
from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar, UnsupportedGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.regex.nodes import (
    Begin,
    Characters,
    Choice,
    End,
    LookAhead,
    LookBehind,
    Node,
    Repeat,
    Sequence,
    word_boundary,
)

RegexSyntax = Literal["ecma", "python"]
_FLAGS: dict[str, str] = {"ecma": "ims", "python": "aimsux"}


def parse_regex(
    pattern: str, limits: Limits, *, syntax: RegexSyntax = "ecma", flags: str = ""
) -> Node:
    """The syntax tree. Raises InvalidGrammar, UnsupportedGrammar, GrammarTooComplex."""
    if syntax not in _FLAGS:
        raise ValueError(f"the syntax of a regex is 'ecma' or 'python', got {syntax!r}")
    for flag in flags:
        if flag not in _FLAGS[syntax]:
            raise ValueError(
                f"the flags of a regex in {syntax} syntax are "
                f"{', '.join(_FLAGS[syntax])}, got {flag!r}"
            )
    if len(pattern) > limits.max_pattern:
        raise GrammarTooComplex(
            f"the pattern has {len(pattern)} characters, the limit is {limits.max_pattern}"
        )
    return _Parser(pattern, limits.max_nesting, syntax, frozenset(flags)).parse()


# Letters and digits that nothing is said about.
_PLAIN = re.compile(r"[A-Za-z0-9_]+(?![*+?{\s#(])")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)
_NAME = re.compile(r"(?:P?<)([^\W\d]\w*|[\w$]+)>")
_INLINE = re.compile(r"([A-Za-z]*)(-[A-Za-z]+)?([:)])")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_REFUSED_GROUPS = {
    "?>": "an atomic group '(?>...)'",
    "?P=": "a back-reference '(?P=...)'",
    "?(": "a conditional group '(?(...)...)'",
    "?P>": "recursion '(?P>...)'",
    "?R": "recursion '(?R)'",
    "?&": "recursion '(?&...)'",
}


@dataclass(frozen=True, slots=True)
class _Classes:
    """What the shorthand classes stand for; computed when they are needed."""

    digits: Callable[[], CodePoints]
    word: Callable[[], CodePoints]
    space: Callable[[], CodePoints]


_ECMA = _Classes(lambda: DIGITS, lambda: WORD, lambda: SPACE)
_PYTHON = _Classes(PYTHON_DIGITS, PYTHON_WORD, PYTHON_SPACE)
_PYTHON_ASCII = _Classes(lambda: DIGITS, lambda: WORD, lambda: ASCII_SPACE)


@cache
def _plain(character: str) -> Characters:
    return Characters(CodePoints.characters(character))


class _Parser:
    def __init__(
        self, pattern: str, max_nesting: int, syntax: RegexSyntax, flags: frozenset[str]
    ) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._max_nesting = max_nesting
        self._is_python = syntax == "python"
        self._syntax = syntax
        self._flags = flags

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise self._invalid("unbalanced ')'")
        return node

    # Flags

    @property
    def _classes(self) -> _Classes:
        if not self._is_python:
            return _ECMA
        return _PYTHON_ASCII if "a" in self._flags else _PYTHON

    def _word(self) -> CodePoints:
        word = self._classes.word()
        return word.any_case() if "i" in self._flags and not self._is_python else word

    def _cased(self, characters: CodePoints) -> CodePoints:
        """In all cases, if case is to be ignored."""
        if "i" not in self._flags:
            return characters
        if not self._is_python or "a" not in self._flags:
            return characters.any_case(like_python=self._is_python)
        letters = characters & _ASCII
        return characters | (letters.any_case() & _ASCII)

    def _line_ends(self) -> CodePoints:
        return _LINE_FEED if self._is_python else LINE_ENDS

    # Structure

    def _choice(self) -> Node:
        flags = self._flags
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        self._flags = flags
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            self._skip()
            if self._at >= len(self._text) or self._text[self._at] in "|)":
                break
            plain = _PLAIN.match(self._text, self._at)
            if plain and "i" not in self._flags:
                items += map(_plain, plain[0])
                self._at = plain.end()
                continue
            node = self._quantified()
            if node is not None:
                items.append(node)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _skip(self) -> None:
        """Pass over comments, and in verbose mode over white space."""
        while True:
            if self._text.startswith("(?#", self._at):
                end = self._text.find(")", self._at)
                if end < 0:
                    raise self._invalid("missing ')' of a comment")
                self._at = end + 1
            elif "x" in self._flags and self._text[self._at : self._at + 1] in _BLANKS:
                self._at += 1
            elif "x" in self._flags and self._text.startswith("#", self._at):
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end + 1
            else:
                return

    def _quantified(self) -> Node | None:
        start = self._at
        node = self._atom()
        if node is None:  # flags
            return None
        self._skip()
        bounds = self._quantifier()
        if bounds is None:
            return node
        if self._text[start] in "^$" or self._text[start : start + 2] in _ANCHORS:
            raise self._invalid("nothing to repeat", start)
        if self._take("+"):
            raise self._unsupported("a possessive quantifier", self._at - 1)
        is_lazy = self._take("?")
        self._skip()
        at = self._at
        if self._quantifier() is not None:
            raise self._invalid("a quantifier after a quantifier", at)
        return Repeat(node, *bounds, is_lazy)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _COUNT.match(self._text, self._at)
        if match is None or not (match[1] or match[3] or (match[2] and self._is_python)):
            return None
        if not match[1] and not self._is_python:
            raise self._unsupported("a count without a lower bound such as '{,3}'", self._at)
        if len(match[1]) > 18 or len(match[3]) > 18:
            raise self._invalid("a count beyond all measure")
        low = int(match[1] or 0)
        high = low if not match[2] else int(match[3]) if match[3] else None
        if high is not None and high < low:
            raise self._invalid(f"the count {match[0]} ends below its start")
        self._at = match.end()
        return low, high

    def _atom(self) -> Node | None:
        character = self._text[self._at]
        if character in "*+?":
            raise self._invalid("nothing to repeat")
        count = _COUNT.match(self._text, self._at) if character == "{" else None
        if count and count[0] != "{}" and (count[0] != "{,}" or self._is_python):
            raise self._invalid("nothing to repeat")
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._class())
        if character == ".":
            if "s" in self._flags:
                return Characters(ANY)
            return Characters(~_LINE_FEED if self._is_python else NOT_LINE_ENDS)
        if character == "^":
            if "m" not in self._flags:
                return Begin()
            line_end = LookBehind(Characters(self._line_ends()), is_negative=False)
            return Choice((Begin(), line_end))
        if character == "$":
            return self._dollar()
        if character == "\\":
            return self._escape()
        return Characters(self._cased(self._one(ord(character), self._at - 1)))

    def _dollar(self) -> Node:
        line_end = Characters(self._line_ends())
        if "m" in self._flags:
            return Choice((End(), LookAhead(line_end, is_negative=False)))
        if self._is_python:
            before_last = LookAhead(Sequence((line_end, End())), is_negative=False)
            return Choice((End(), before_last))
        return End()

    def _group(self) -> Node | None:
        start = self._at - 1
        self._depth += 1
        if self._depth > self._max_nesting:
            raise GrammarTooComplex(
                f"position {start}: more than {self._max_nesting} groups inside each other"
            )
        look: type[LookAhead | LookBehind] | None = None
        is_negative = False
        outer = self._flags
        if self._take("?"):
            rest = self._text[self._at - 1 : self._at + 2]
            for opening, name in _REFUSED_GROUPS.items():
                if rest.startswith(opening):
                    raise self._unsupported(name, start)
            named = _NAME.match(self._text, self._at)
            if named:
                self._at = named.end()
            elif rest[1:2] in ("=", "!") or rest[1:] in ("<=", "<!"):
                look = LookBehind if rest[1] == "<" else LookAhead
                is_negative = rest.endswith("!") if rest[1] == "<" else rest[1] == "!"
                self._at += 2 if rest[1] == "<" else 1
            elif self._inline_flags(start):
                self._depth -= 1
                return None
        node = self._choice()
        if not self._take(")"):
            raise self._invalid("missing ')'", start)
        self._flags = outer
        self._depth -= 1
        return node if look is None else look(node, is_negative)

    def _inline_flags(self, start: int) -> bool:
        """Read flags up to a colon, or to the end of the group: whether that is all of it."""
        match = _INLINE.match(self._text, self._at)
        if match is None or (match[3] == ")" and not match[1]):
            raise self._invalid("unknown kind of group", start)
        off = (match[2] or "-")[1:]
        for flag in match[1] + off:
            if flag not in _FLAGS[self._syntax]:
                raise self._unsupported(f"the inline flag '{flag}'", start)
        if match[3] == ")":
            if match[2]:
                raise self._invalid("flags are switched off for a group only", start)
            if self._is_python and start:
                raise self._invalid("flags that are not at the start of the pattern", start)
        elif "u" in match[1] and "a" in match[1]:
            raise self._invalid("the flags 'a' and 'u' exclude each other", start)
        self._at = match.end()
        flags = self._flags
        if "u" in match[1]:
            flags -= {"a"}
        self._flags = (flags | frozenset(match[1])) - frozenset(off)
        return match[3] == ")"

    # Escapes

    def _escape(self) -> Node:
        start = self._at - 1
        if self._at >= len(self._text):
            raise self._invalid("a backslash at the end", start)
        character = self._text[self._at]
        if character in "bB":
            self._at += 1
            boundary = word_boundary(self._word(), character == "B")
            if self._is_python and character == "B" and _B_NEEDS_A_CHARACTER:
                one = Characters(ANY)
                some = Choice((LookBehind(one, False), LookAhead(one, False)))
                return Sequence((some, boundary))
            return boundary
        if character == "A":
            self._at += 1
            return Begin()
        if character in "Zz":
            self._at += 1
            return End()
        if character == "k" and not self._is_python:
            raise self._unsupported("a back-reference '\\k'", start)
        if character in "123456789" and not self._is_octal(start):
            raise self._unsupported(f"a back-reference '\\{character}'", start)
        return Characters(self._escaped_set(start))

    def _is_octal(self, start: int) -> bool:
        """Whether digits after a backslash, outside a class, are an octal escape of Python."""
        digits = self._text[start + 1 : start + 4]
        return self._is_python and bool(re.fullmatch("[0-3][0-7][0-7]", digits))

    def _escaped_set(self, start: int) -> CodePoints:
        """What the escape whose backslash is at `start` stands for, in and outside a class."""
        character = self._text[self._at]
        self._at += 1
        shorthand = self._shorthand(character)
        if shorthand is not None:
            return shorthand
        if character in "pP" and not self._is_python:
            return self._property(start, character == "P")
        return self._cased(self._one(self._escaped_character(character, start), start))

    def _shorthand(self, character: str) -> CodePoints | None:
        kind = character.lower()
        if kind == "w":
            found = self._word()
        elif kind == "d":
            found = self._classes.digits()
        elif kind == "s":
            found = self._classes.space()
        else:
            return None
        return found if character == kind else ~found

    def _escaped_character(self, character: str, start: int) -> int:
        if character in _CONTROLS:
            return ord(_CONTROLS[character])
        if character == "a" and self._is_python:
            return 7
        if character == "x":
            return self._hex(2, start)
        if character == "u":
            return self._hex(4, start) if self._is_python else self._unicode(start)
        if character == "U":
            return self._hex(8, start)
        if character == "N" and self._is_python:
            return self._named(start)
        if character == "c" and not self._is_python:
            letter = self._text[self._at : self._at + 1]
            if not (letter.isascii() and letter.isalpha()):
                raise self._invalid("'\\c' needs a letter", start)
            self._at += 1
            return ord(letter) % 32
        if character in "01234567":
            octal = re.compile("[0-3]?[0-7]?[0-7]" if character < "4" else "[0-7]{1,2}")
            if self._is_python:
                octal = re.compile("0[0-7]{0,2}|[0-3][0-7]{2}")
            digits = octal.match(self._text, start + 1)
            if digits is None:
                raise self._invalid(f"unknown escape '\\{character}'", start)
            self._at = digits.end()
            return int(digits[0], 8)
        if character.isalnum():
            raise self._invalid(f"unknown escape '\\{character}'", start)
        return ord(character)

    def _named(self, start: int) -> int:
        name = re.compile(r"\{([^}]+)\}").match(self._text, self._at)
        try:
            found = unicodedata.lookup(name[1]) if name else ""
        except KeyError:
            found = ""
        if name is None or len(found) != 1:
            raise self._invalid("'\\N' needs the name of a character in braces", start)
        self._at = name.end()
        return ord(found)

    def _unicode(self, start: int) -> int:
        if self._take("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : end] if end >= 0 else ""
            if not re.fullmatch(r"[0-9A-Fa-f]{1,6}", digits):
                raise self._invalid("'\\u{' needs one to six hexadecimal digits and '}'", start)
            self._at = end + 1
            return int(digits, 16)
        unit = self._hex(4, start)
        low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._text, self._at)
        if 0xD800 <= unit < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + ((unit - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
        return unit

    def _hex(self, count: int, start: int) -> int:
        digits = self._text[self._at : self._at + count]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
            raise self._invalid(f"the escape needs {count} hexadecimal digits", start)
        self._at += count
        return int(digits, 16)

    def _property(self, start: int, is_negated: bool) -> CodePoints:
        match = re.compile(r"\{(\^?)([\w=: -]+)\}").match(self._text, self._at)
        if match is None:
            raise self._invalid("'\\p' needs a name in braces", start)
        name = re.sub(r"^(?:gc|General_Category)=", "", match[2])
        found = general_category(name)
        if found is None and name == match[2]:
            found = binary_property(name)
        if found is None or match[1]:
            raise self._unsupported(f"the Unicode property '{match[2]}'", start)
        self._at = match.end()
        return self._cased(~found if is_negated else found)

    def _class(self) -> CodePoints:
        start = self._at - 1
        is_negated = self._take("^")
        members: list[CodePoints] = []
        if self._is_python and self._take("]"):  # the first one is itself
            self._at -= 1
            members += self._range_or_member()
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._invalid("missing ']'", start)
            members += self._range_or_member()
        union = CodePoints.of(each for member in members for each in member.ranges)
        return ANY - union if is_negated else union

    def _range_or_member(self) -> list[CodePoints]:
        first_at = self._at
        first, low = self._member()
        if self._text[self._at : self._at + 1] != "-" or self._text[
            self._at + 1 : self._at + 2
        ] in ("]", ""):
            return [first if low is None else self._cased(first)]
        self._at += 1
        last, high = self._member()
        if low is None or high is None:  # a class at one end: the dash is itself
            if self._is_python:
                raise self._invalid("a range with a class at one end", first_at)
            return [self._cased(first), CodePoints.characters("-"), self._cased(last)]
        if high < low:
            raise self._invalid("a range that ends before it starts", first_at)
        return [self._cased(CodePoints.of([(low, high)]))]

    def _member(self) -> tuple[CodePoints, int | None]:
        """A member of a class, and its code point if it is a single character."""
        start = self._at
        character = self._text[self._at]
        self._at += 1
        if character == "[" and self._text[self._at : self._at + 1] in (":", ".", "="):
            raise self._unsupported("a POSIX class such as '[[:alpha:]]'", start)
        if character != "\\":
            return self._one(ord(character), start), ord(character)
        if self._at >= len(self._text):
            raise self._invalid("a backslash at the end", start)
        if self._take("b"):
            return CodePoints.characters("\b"), 8
        character = self._text[self._at]
        if character.lower() in "dws" or (character in "pP" and not self._is_python):
            return self._escaped_set(start), None
        self._at += 1
        code_point = self._escaped_character(character, start)
        return self._one(code_point, start), code_point

    def _one(self, code_point: int, start: int) -> CodePoints:
        if code_point > 0x10FFFF:
            raise self._invalid("a code point beyond U+10FFFF", start)
        if 0xD800 <= code_point <= 0xDFFF:
            raise self._unsupported("a lone surrogate", start)
        return CodePoints(((code_point, code_point),))

    def _take(self, character: str) -> bool:
        if self._text.startswith(character, self._at):
            self._at += 1
            return True
        return False

    def _invalid(self, message: str, at: int | None = None) -> InvalidGrammar:
        return InvalidGrammar(f"position {self._at if at is None else at}: {message}")

    def _unsupported(self, feature: str, at: int) -> UnsupportedGrammar:
        return UnsupportedGrammar(f"position {at}: {feature} is not supported", feature=feature)


_ASCII = CodePoints.of([(0, 0x7F)])
_LINE_FEED = CodePoints.characters("\n")
# Python's own \\B holds nowhere in a text without characters, up to 3.13.
_B_NEEDS_A_CHARACTER = sys.version_info < (3, 14)
_ANCHORS = frozenset({"\\b", "\\B", "\\A", "\\Z", "\\z"})
_BLANKS = tuple(" \t\n\r\f\v")
