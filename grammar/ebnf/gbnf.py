"""Reads GBNF, the notation of llama.cpp: ``root ::= "a" [0-9]+ | (other ","){2,5}``.

A rule goes on over line ends until the next ``name ::=`` at the beginning of a line. ``.`` and
negated classes take any character, line ends too. Names hold letters, digits, ``-`` and ``_``.
"""

from __future__ import annotations

import re

from palmette.grammar.codepoints import ANY, CodePoints
from palmette.grammar.ebnf.nodes import (
    Grammar,
    Node,
    Reference,
    Repeat,
    Terminal,
    Words,
    choice,
    sequence,
)
from palmette.grammar.ebnf.text import BOUNDS, Reader
from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar
from palmette.grammar.spelling import Utf8
from palmette.grammar.term_store import TermStore


def read_gbnf(source: str, store: TermStore, start: str | None = None) -> Grammar:
    """The grammar, beginning with the rule `start`, or `root`.

    Raises InvalidGrammar, UnsupportedGrammar, GrammarTooComplex.
    """
    return _Gbnf(source, store).read("root" if start is None else start)


_BLANK = re.compile(r"[ \t\r\n]+|#[^\r\n]*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNT = re.compile(r"\{\s*([0-9]*)\s*(,?)\s*([0-9]*)\s*\}")
_PLAIN = re.compile(r'[^"\\]+')
_HEX = {"x": 2, "u": 4, "U": 8}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class _Gbnf(Reader):
    def __init__(self, source: str, store: TermStore) -> None:
        super().__init__(source, store)
        self._spelling = Utf8(store)
        self._rules: dict[str, Node] = {}
        self._references: list[tuple[str, int]] = []

    def read(self, start: str) -> Grammar:
        self.skip(_BLANK)
        while not self.is_at_end:
            self._rule()
        if start not in self._rules:
            raise InvalidGrammar(f"there is no rule '{start}' to begin with")
        for name, at in self._references:
            if name not in self._rules:
                raise self.invalid(f"the rule '{name}' is not defined", at)
        return Grammar(start, self._rules)

    def _rule(self) -> None:
        at = self.at
        name = self._head()
        if name is None:
            raise self.invalid(f"expected 'name ::=', got {self.shown()}")
        if name in self._rules:
            raise self.invalid(f"the rule '{name}' is defined twice", at)
        self.skip(_BLANK)
        self._rules[name] = self._alternatives()
        if not (self.is_at_end or self._is_at_rule()):
            raise self.invalid(f"unexpected {self.shown()}")

    def _head(self) -> str | None:
        """Go past `name ::=` if that comes next; the name."""
        at = self.at
        name = self.match(_NAME)
        if name is not None:
            self.skip(_BLANK)
            if self.take("::="):
                return name[0]
        self.at = at
        return None

    def _is_at_rule(self) -> bool:
        """Whether a rule begins here, at the beginning of a line."""
        at = self.at
        name = self._head()
        self.at = at
        return name is not None and not self.source[self.source.rfind("\n", 0, at) + 1 : at].strip()

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self.take("|"):
            self.skip(_BLANK)
            branches.append(self._sequence())
        return choice(branches)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while True:
            item = self._item()
            if item is None:
                return sequence(items)
            items.append(item)

    def _item(self) -> Node | None:
        node = self._atom()
        if node is None:
            return None
        self.skip(_BLANK)
        for _ in range(self.store.limits.max_nesting):
            bounds = self._quantifier()
            if bounds is None:
                return node
            node = Repeat(node, *bounds)
            self.skip(_BLANK)
        raise GrammarTooComplex(
            f"{self.store.limits.max_nesting} repetitions of each other", pointer=self.where()
        )

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in BOUNDS.items():
            if self.take(sign):
                return bounds
        if not self.looks_at("{"):
            return None
        at = self.at
        found = self.match(_COUNT)
        if found is None or not (found[1] or found[3]):
            raise self.invalid("expected a count such as {2}, {2,} or {2,5}", at)
        low = self.count(found[1] or "0", at)
        high = low if not found[2] else self.count(found[3], at) if found[3] else None
        if high is not None and high < low:
            raise self.invalid("the count ends below its start", at)
        return low, high

    def _atom(self) -> Node | None:
        at = self.at
        if self.take('"'):
            return Words((self._literal(at),))
        if self.take("["):
            return Terminal(self._spelling.one_of(self._class(at)))
        if self.take("."):
            return Terminal(self._spelling.one_of(ANY))
        if self.take("("):
            return self._group(at)
        if self.looks_at("<") or self.looks_at("!<"):
            raise self.unsupported("a token such as <[1000]> or <think>")
        name = None if self._is_at_rule() else self.match(_NAME)
        if name is None:
            return None
        self._references.append((name[0], at))
        return Reference(name[0])

    def _group(self, at: int) -> Node:
        self.open_group()
        self.skip(_BLANK)
        if self.looks_at("="):
            raise self.unsupported("a lookahead '(=...)'", at)
        node = self._alternatives()
        if not self.take(")"):
            raise self.invalid("missing ')'", at)
        self.close_group()
        return node

    def _literal(self, start: int) -> bytes:
        text: list[str] = []
        while not self.take('"'):
            plain = self.match(_PLAIN)
            if plain is not None:
                text.append(plain[0])
            elif self.is_at_end:
                raise self.invalid("missing '\"'", start)
            else:
                text.append(chr(self._character()))
        try:
            return "".join(text).encode()
        except UnicodeEncodeError:
            raise self.unsupported("a lone surrogate", start) from None

    def _class(self, start: int) -> CodePoints:
        is_negated = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.is_at_end:
                raise self.invalid("missing ']'", start)
            at = self.at
            low = high = self._character()
            if self.looks_at("-") and not self.looks_at("-]"):
                self.at += 1
                if self.is_at_end:
                    raise self.invalid("missing ']'", start)
                high = self._character()
            if high < low:
                raise self.invalid("a range that ends before it starts", at)
            ranges.append((low, high))
        if not ranges:
            raise self.invalid("an empty class; write '\\]' for a bracket in a class", start)
        found = CodePoints.of(ranges)
        return ~found if is_negated else found

    def _character(self) -> int:
        self.store.spend()
        at = self.at
        self.at += 1
        if self.source[at] != "\\":
            return ord(self.source[at])
        if self.is_at_end:
            raise self.invalid("a backslash at the end", at)
        escaped = self.source[self.at]
        self.at += 1
        if escaped in _HEX:
            digits = self.source[self.at : self.at + _HEX[escaped]]
            if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX[escaped]}}}", digits):
                raise self.invalid(f"the escape needs {_HEX[escaped]} hexadecimal digits", at)
            self.at += _HEX[escaped]
            if int(digits, 16) > 0x10FFFF:
                raise self.invalid("a code point beyond U+10FFFF", at)
            return int(digits, 16)
        if escaped in _CONTROLS:
            return ord(_CONTROLS[escaped])
        if escaped.isalnum():
            raise self.invalid(f"unknown escape '\\{escaped}'", at)
        return ord(escaped)
