"""From the syntax of a regular expression to a term."""

from __future__ import annotations

from typing import NamedTuple

from palmette.grammar.codepoints import ANY
from palmette.grammar.errors import UnsupportedGrammar
from palmette.grammar.regex.parser import (
    Begin,
    Characters,
    Choice,
    End,
    LookAhead,
    Node,
    Repeat,
    Sequence,
)
from palmette.grammar.spelling import Spelling
from palmette.grammar.terms import Term


def full_match(node: Node, spelling: Spelling) -> Term:
    """The texts that the expression matches as a whole."""
    return _Translator(spelling).full_match(node)


def search(node: Node, spelling: Spelling) -> Term:
    """The texts in which the expression matches somewhere."""
    return _Translator(spelling).search(node)


class _After(NamedTuple):
    """What follows: if nothing of the text has been consumed yet, and otherwise.

    Assertions look at what stands on both sides of them. What is before matters only in being
    nothing or something; what is after is known when translating from the end.
    """

    at_start: Term
    inside: Term


class _Translator:
    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._store = spelling.store
        self._anything = self._store.repeat(spelling.one_of(ANY), 0, None)

    def full_match(self, node: Node) -> Term:
        if not _asserts(node):
            return self._plain(node)
        return self._followed(node, _After(self._store.epsilon, self._store.epsilon)).at_start

    def search(self, node: Node) -> Term:
        store = self._store
        if not _asserts(node):
            return store.sequence(self._anything, self._plain(node), self._anything)
        found = self._followed(node, _After(self._anything, self._anything))
        before = store.repeat(self._spelling.one_of(ANY), 1, None)
        return store.alternation((found.at_start, store.sequence(before, found.inside)))

    def _plain(self, node: Node) -> Term:
        """A node without assertions, on its own."""
        store = self._store
        if isinstance(node, Characters):
            return self._spelling.one_of(node.set)
        if isinstance(node, Sequence):
            return store.sequence(*(self._plain(item) for item in node.items))
        if isinstance(node, Choice):
            return store.alternation(self._plain(item) for item in node.items)
        assert isinstance(node, Repeat)
        return store.repeat(self._plain(node.item), node.low, node.high)

    def _followed(self, node: Node, after: _After) -> _After:
        """The node and all that follows it."""
        store = self._store
        if not _asserts(node):
            return self._plain_followed(node, after)
        if isinstance(node, Sequence):
            for item in reversed(node.items):
                after = self._followed(item, after)
            return after
        if isinstance(node, Choice):
            branches = [self._followed(item, after) for item in node.items]
            return _After(
                store.alternation(branch.at_start for branch in branches),
                store.alternation(branch.inside for branch in branches),
            )
        if isinstance(node, Begin):
            return _After(after.at_start, store.empty)
        if isinstance(node, End):
            return _After(*(store.epsilon if term.nullable else store.empty for term in after))
        if isinstance(node, LookAhead):
            ahead = self._followed(node.item, _After(self._anything, self._anything))
            if node.is_negative:
                ahead = _After(*(store.complement(term) for term in ahead))
            return _After(*(store.both(*pair) for pair in zip(ahead, after, strict=True)))
        assert isinstance(node, Repeat)
        return self._repeat_followed(node, after)

    def _plain_followed(self, node: Node, after: _After) -> _After:
        store = self._store
        term = self._plain(node)
        inside = store.sequence(term, after.inside)
        if not term.nullable or after.at_start is after.inside:
            return _After(inside, inside)
        something = store.both(term, store.complement(store.epsilon))
        consumed = store.sequence(something, after.inside)
        return _After(store.alternation((after.at_start, consumed)), inside)

    def _repeat_followed(self, node: Repeat, after: _After) -> _After:
        if node.high is None or node.high > 1:
            raise UnsupportedGrammar(
                "an anchor or lookahead inside a repetition is not supported",
                feature="an anchor or lookahead inside a repetition",
            )
        if node.high == 0:
            return after
        once = self._followed(node.item, after)
        if node.low == 1:
            return once
        store = self._store
        return _After(*(store.alternation(pair) for pair in zip(once, after, strict=True)))


def _asserts(node: Node) -> bool:
    """Whether there is an anchor or a lookahead in it."""
    if isinstance(node, (Sequence, Choice)):
        return any(_asserts(item) for item in node.items)
    if isinstance(node, Repeat):
        return _asserts(node.item)
    return isinstance(node, (Begin, End, LookAhead))
