"""Reads a regular expression in the common part of ECMA-262 and Python syntax.

``\\d``, ``\\w`` are ASCII; ``\\s`` and ``.`` are those of ECMA-262 (the dot takes no line end).
Lazy quantifiers and names of groups change nothing about what matches. What is not regular, or
means one thing in ECMA-262 and another in Python, is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palmette.grammar.codepoints import (
    ANY,
    DIGITS,
    NOT_LINE_ENDS,
    SPACE,
    WORD,
    CodePoints,
    general_category,
)
from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar, UnsupportedGrammar
from palmette.grammar.limits import Limits


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    set: CodePoints


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """At least `low` times, at most `high` times; None is without end."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Begin:
    """Only at the beginning of the text."""


@dataclass(frozen=True, slots=True)
class End:
    """Only at the very end of the text."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """What follows begins with `item`, or does not."""

    item: Node
    is_negative: bool


Node = Characters | Sequence | Choice | Repeat | Begin | End | LookAhead


def parse_regex(pattern: str, limits: Limits) -> Node:
    """The syntax tree. Raises InvalidGrammar, UnsupportedGrammar, GrammarTooComplex."""
    if len(pattern) > limits.max_pattern:
        raise GrammarTooComplex(
            f"the pattern has {len(pattern)} characters, the limit is {limits.max_pattern}"
        )
    return _Parser(pattern, limits.max_nesting).parse()


_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}", re.ASCII)
_NAME = re.compile(r"(?:P?<)([A-Za-z_$][\w$]*)>")
_CLASSES = {
    "d": DIGITS,
    "D": ~DIGITS,
    "w": WORD,
    "W": ~WORD,
    "s": SPACE,
    "S": ~SPACE,
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_REFUSED_GROUPS = {
    "?<=": "lookbehind '(?<=...)'",
    "?<!": "lookbehind '(?<!...)'",
    "?>": "an atomic group '(?>...)'",
    "?P=": "a back-reference '(?P=...)'",
    "?(": "a conditional group '(?(...)...)'",
    "?P>": "recursion '(?P>...)'",
    "?R": "recursion '(?R)'",
    "?&": "recursion '(?&...)'",
}


class _Parser:
    def __init__(self, pattern: str, max_nesting: int) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._max_nesting = max_nesting

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise self._invalid("unbalanced ')'")
        return node

    def _choice(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Choice(tuple(branches))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            items.append(self._quantified())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _quantified(self) -> Node:
        start = self._at
        node = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return node
        if isinstance(node, (Begin, End)) and self._text[start] != "(":
            raise self._invalid("nothing to repeat", start)
        if self._take("+"):
            raise self._unsupported("a possessive quantifier", self._at - 1)
        self._take("?")  # lazy: the same language
        at = self._at
        if self._quantifier() is not None:
            raise self._invalid("a quantifier after a quantifier", at)
        return Repeat(node, *bounds)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        match = _COUNT.match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            return None
        if not match[1]:
            raise self._unsupported("a count without a lower bound such as '{,3}'", self._at)
        if len(match[1]) > 18 or len(match[3]) > 18:
            raise self._invalid("a count beyond all measure")
        low = int(match[1])
        high = low if not match[2] else int(match[3]) if match[3] else None
        if high is not None and high < low:
            raise self._invalid(f"the count {match[0]} ends below its start")
        self._at = match.end()
        return low, high

    def _atom(self) -> Node:
        character = self._text[self._at]
        if character in "*+?":
            raise self._invalid("nothing to repeat")
        if (
            character == "{"
            and _COUNT.match(self._text, self._at)
            and self._text[self._at + 1] != "}"
        ):
            raise self._invalid("nothing to repeat")
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._class())
        if character == ".":
            return Characters(NOT_LINE_ENDS)
        if character == "^":
            return Begin()
        if character == "$":
            return End()
        if character == "\\":
            return self._escape()
        return Characters(self._one(ord(character), self._at - 1))

    def _group(self) -> Node:
        start = self._at - 1
        self._depth += 1
        if self._depth > self._max_nesting:
            raise GrammarTooComplex(
                f"position {start}: more than {self._max_nesting} groups inside each other"
            )
        look: bool | None = None  # whether negative
        if self._take("?"):
            rest = self._text[self._at - 1 : self._at + 2]
            for opening, name in _REFUSED_GROUPS.items():
                if rest.startswith(opening):
                    raise self._unsupported(name, start)
            named = _NAME.match(self._text, self._at)
            if named:
                self._at = named.end()
            elif self._take("="):
                look = False
            elif self._take("!"):
                look = True
            elif not self._take(":"):
                if re.match(r"[A-Za-z-]+[:)]", self._text[self._at :]):
                    raise self._unsupported("an inline flag such as '(?i)'", start)
                raise self._invalid("unknown kind of group", start)
        node = self._choice()
        if not self._take(")"):
            raise self._invalid("missing ')'", start)
        self._depth -= 1
        return node if look is None else LookAhead(node, look)

    def _escape(self) -> Node:
        start = self._at - 1
        if self._at >= len(self._text):
            raise self._invalid("a backslash at the end", start)
        character = self._text[self._at]
        if character in "123456789":
            raise self._unsupported(f"a back-reference '\\{character}'", start)
        if character == "k":
            raise self._unsupported("a back-reference '\\k'", start)
        if character in "bB":
            raise self._unsupported(f"a word boundary '\\{character}'", start)
        if character == "A":
            self._at += 1
            return Begin()
        if character in "Zz":
            self._at += 1
            return End()
        return Characters(self._escaped_set(start))

    def _escaped_set(self, start: int) -> CodePoints:
        """What the escape whose backslash is at `start` stands for, in and outside a class."""
        character = self._text[self._at]
        self._at += 1
        if character in _CLASSES:
            return _CLASSES[character]
        if character in _CONTROLS:
            return CodePoints.characters(_CONTROLS[character])
        if character in "pP":
            return self._property(start, character == "P")
        if character == "x":
            return self._one(self._hex(2, start), start)
        if character == "u":
            return self._one(self._unicode(start), start)
        if character == "U":
            return self._one(self._hex(8, start), start)
        if character == "c":
            letter = self._text[self._at : self._at + 1]
            if not (letter.isascii() and letter.isalpha()):
                raise self._invalid("'\\c' needs a letter", start)
            self._at += 1
            return CodePoints.characters(chr(ord(letter) % 32))
        if character == "0":
            if self._text[self._at : self._at + 1].isdigit():
                raise self._unsupported("an octal escape", start)
            return CodePoints.characters("\0")
        if character.isalnum():
            raise self._invalid(f"unknown escape '\\{character}'", start)
        return self._one(ord(character), start)

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
        if found is None or match[1]:
            raise self._unsupported(f"the Unicode property '{match[2]}'", start)
        self._at = match.end()
        return ~found if is_negated else found

    def _class(self) -> CodePoints:
        start = self._at - 1
        is_negated = self._take("^")
        if self._text[self._at : self._at + 1] == "]":
            raise self._unsupported(
                "']' right after the beginning of a class, unescaped,", self._at
            )
        members: list[CodePoints] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._invalid("missing ']'", start)
            first_at = self._at
            first = self._member()
            if self._text[self._at : self._at + 1] != "-" or self._text[
                self._at + 1 : self._at + 2
            ] in ("]", ""):
                members.append(first)
                continue
            self._at += 1
            last = self._member()
            low, high = _single(first), _single(last)
            if low is None or high is None:  # a class at one end: the dash is itself
                members += (first, CodePoints.characters("-"), last)
                continue
            if high < low:
                raise self._invalid("a range that ends before it starts", first_at)
            members.append(CodePoints.of([(low, high)]))
        union = CodePoints.of(each for member in members for each in member.ranges)
        return ANY - union if is_negated else union

    def _member(self) -> CodePoints:
        start = self._at
        character = self._text[self._at]
        self._at += 1
        if character == "[" and self._text[self._at : self._at + 1] in (":", ".", "="):
            raise self._unsupported("a POSIX class such as '[[:alpha:]]'", start)
        if character != "\\":
            return self._one(ord(character), start)
        if self._at >= len(self._text):
            raise self._invalid("a backslash at the end", start)
        if self._take("b"):
            return CodePoints.characters("\b")
        if self._text[self._at] in "123456789":
            raise self._unsupported("an octal escape", start)
        return self._escaped_set(start)

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


def _single(characters: CodePoints) -> int | None:
    if len(characters.ranges) == 1 and characters.ranges[0][0] == characters.ranges[0][1]:
        return characters.ranges[0][0]
    return None
