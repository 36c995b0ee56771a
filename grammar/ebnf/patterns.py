"""Regular expressions and strings of a grammar as terms, by the rules of Python."""

from __future__ import annotations

import math

from palmette.grammar.codepoints import CodePoints
from palmette.grammar.ebnf.nodes import Node, Terminal, Words, sequence
from palmette.grammar.errors import UnsupportedGrammar
from palmette.grammar.regex import full_match, parse_regex
from palmette.grammar.regex.nodes import (
    Begin,
    Characters,
    Choice,
    End,
    LookAhead,
    LookBehind,
    Repeat,
    Sequence,
    children,
)
from palmette.grammar.regex.nodes import Node as RegexNode
from palmette.grammar.spelling import Utf8
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import ALL_BYTES, Term


def is_lazy(node: RegexNode) -> bool:
    """Whether there is a lazy repetition in it, such as `.*?`."""
    return (isinstance(node, Repeat) and node.is_lazy) or any(map(is_lazy, children(node)))


class Patterns:
    """Makes terms of one store."""

    def __init__(self, store: TermStore) -> None:
        self._store = store
        self._spelling = Utf8(store)

    def read(self, pattern: str, flags: str) -> RegexNode:
        """The pattern of a terminal, with flags as in `(?imslux)`."""
        if "l" in flags:
            raise _unsupported("the flag 'l', by which a pattern depends on the locale,")
        node = parse_regex(pattern, self._store.limits, syntax="python", flags=flags)
        _check_assertions(node)
        return node

    def term(self, node: RegexNode) -> Term:
        """The texts that the pattern matches as a whole."""
        return full_match(node, self._spelling)

    def first_end(self, term: Term) -> Term:
        """Those of its texts that do not go on after another one of them.

        What a lazy repetition is written for: up to the first quote, not up to any.
        """
        store = self._store
        longer = store.sequence(term, store.byte_set(ALL_BYTES), store.anything)
        return store.both(term, store.complement(longer))

    def one_of(self, characters: CodePoints) -> Node:
        """One character of the set."""
        return Terminal(self._spelling.one_of(characters))

    def any_case(self, text: str) -> Node:
        """The text in lower or upper case, or mixed, as Python's IGNORECASE has it."""
        return sequence(map(self._any_case_of, text))

    def _any_case_of(self, character: str) -> Node:
        variants = CodePoints.characters(character).any_case(like_python=True)
        return Words((character.encode(),)) if len(variants) == 1 else self.one_of(variants)


def _check_assertions(root: RegexNode) -> None:
    """What a terminal may be must not depend on what stands around it.

    So it may look back no further than to its own beginning.
    """
    pending = [(root, 0)]  # and at least how many characters of the terminal are before it
    while pending:
        node, before = pending.pop()
        if isinstance(node, LookBehind) and _width(node.item) <= before:
            continue
        if isinstance(node, (Begin, End, LookAhead, LookBehind)):
            raise _unsupported("an anchor, a word boundary or looking around in a terminal")
        for item in children(node):
            pending.append((item, before))
            if isinstance(node, Sequence):
                before += _least(item)


def _least(node: RegexNode) -> int:
    """At least how many characters a node takes."""
    if isinstance(node, Characters):
        return 1
    if isinstance(node, Sequence):
        return sum(map(_least, node.items))
    if isinstance(node, Choice):
        return min(map(_least, node.items))
    return node.low * _least(node.item) if isinstance(node, Repeat) else 0


def _width(node: RegexNode) -> float:
    """At most how many characters a node takes."""
    if isinstance(node, Characters):
        return 1
    if isinstance(node, Sequence):
        return sum(map(_width, node.items))
    if isinstance(node, Choice):
        return max(map(_width, node.items))
    if isinstance(node, Repeat) and node.high is not None:
        return node.high * _width(node.item)
    return math.inf


def _unsupported(feature: str) -> UnsupportedGrammar:
    return UnsupportedGrammar(f"{feature} is not supported", feature=feature)
