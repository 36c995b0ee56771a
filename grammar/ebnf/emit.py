"""From a grammar to terms: regular parts as lexemes, all else as rules that are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from palmette.grammar.ebnf.graph import components, is_circle
from palmette.grammar.ebnf.nodes import (
    Choice,
    Grammar,
    Node,
    Reference,
    Repeat,
    called,
    combined,
    inside_out,
    items_of,
)
from palmette.grammar.ebnf.recursion import with_loops, without_left_recursion
from palmette.grammar.ebnf.shortest import Shortest
from palmette.grammar.emitted import Emitted
from palmette.grammar.errors import GrammarTooComplex, UnsatisfiableGrammar
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Rule, Term

# A part is one lexeme up to this many words and classes, written out; beyond it, it is called.
# Larger ones would share fewer masks, and written out they may grow without bound.
_LEXEME_NODES = 256
_LEXEME_DEPTH = 24
# Rules that begin with each other in a row. The machine goes through all of them for one byte.
_FIRST_CALLS = 64


def emit(grammar: Grammar, store: TermStore) -> Emitted:
    """The texts that the grammar derives.

    Raises UnsatisfiableGrammar, GrammarTooComplex.
    """
    rules = _reachable(grammar.rules, grammar.start, store)
    shortest = Shortest(rules, store)
    if grammar.start not in shortest.rule_bytes:
        raise UnsatisfiableGrammar(f"no text satisfies the rule '{grammar.start}'")
    notes = [
        f"the rule '{name}' derives no text" for name in rules if name not in shortest.rule_bytes
    ]
    rules = without_left_recursion(rules, shortest, store)
    rules = _reachable(with_loops(rules, store), grammar.start, store)
    emitter = _Emitter(rules, Shortest(rules, store), store)
    return Emitted(emitter.call(grammar.start), tuple(notes))


def _reachable(rules: dict[str, Node], start: str, store: TermStore) -> dict[str, Node]:
    found: dict[str, Node] = {}
    seen: set[Node] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = rules[name]
        for node in inside_out(rules[name], seen.__contains__):
            seen.add(node)
            store.spend()
            if isinstance(node, Reference):
                pending.append(node.name)
    return {name: root for name, root in rules.items() if name in found}


class _Size(NamedTuple):
    """How large a regular part is, written out."""

    nodes: int
    depth: int


_TOO_LARGE = _Size(_LEXEME_NODES + 1, 0)


class _Emitter:
    def __init__(self, rules: dict[str, Node], shortest: Shortest, store: TermStore) -> None:
        self._bodies = rules
        self._shortest = shortest
        self._store = store
        self._sizes: dict[Node, _Size] = {}
        self._rule_sizes: dict[str, _Size] = {}
        self._plain: dict[Node, Term] = {}
        self._full: dict[Node, Term] = {}
        self._least: dict[Node, Term] = {}
        self._measure()
        self._rules: dict[str, Rule] = {}
        for name in shortest.order:
            if not self._is_regular_rule(name):
                self._rules[name] = self._rule(name, rules[name])

    def call(self, name: str) -> Term:
        """What the rule allows."""
        if name in self._rules:
            return self._store.call(self._rules[name])
        if name not in self._shortest.rule_bytes:
            return self._store.empty
        return self._store.lexeme(self._regular(self._bodies[name]))

    def _rule(self, name: str, root: Node) -> Rule:
        num_bytes = self._shortest.rule_bytes[name]
        return Rule(
            name,
            lambda: self._term(root),
            shortest=lambda: self._shortest_term(root),
            min_bytes=num_bytes,
            nullable=num_bytes == 0,
        )

    # Which parts are lexemes

    def _measure(self) -> None:
        calls = {name: called(root) for name, root in self._bodies.items()}
        chains: dict[str, int] = {}
        for names in components(calls):
            for name in names:
                self._rule_sizes[name] = _TOO_LARGE
            for name in names:
                size = self._size(self._bodies[name])
                if not is_circle(names, calls):
                    self._rule_sizes[name] = size
        first_calls = {
            name: self._shortest.first_calls(root) for name, root in self._bodies.items()
        }
        for (name,) in components(first_calls):  # no circles are left
            chain = 1 + max((chains[other] for other in first_calls[name]), default=0)
            if chain > _FIRST_CALLS and not self._is_regular_rule(name):
                raise GrammarTooComplex(
                    f"more than {_FIRST_CALLS} rules begin with each other in a row, "
                    f"up to the rule '{name}'"
                )
            chains[name] = 0 if self._is_regular_rule(name) else chain

    def _size(self, root: Node) -> _Size:
        for node in inside_out(root, self._sizes.__contains__):
            self._store.spend()
            if isinstance(node, Reference):
                size = self._rule_sizes[node.name]
            else:
                inner = [self._sizes[item] for item in items_of(node)]
                size = _Size(
                    min(sum(each.nodes for each in inner) or 1, _TOO_LARGE.nodes),
                    1 + max((each.depth for each in inner), default=0),
                )
            self._sizes[node] = size
        return self._sizes[root]

    def _is_regular_rule(self, name: str) -> bool:
        return _fits(self._rule_sizes[name])

    def _is_regular(self, node: Node) -> bool:
        return _fits(self._sizes[node])

    # Terms

    def _regular(self, root: Node) -> Term:
        """A regular node, not marked as a lexeme."""
        return self._fold(root, self._plain, self._regular_items, self._make_regular)

    def _regular_items(self, node: Node) -> tuple[Node, ...]:
        return (self._bodies[node.name],) if isinstance(node, Reference) else items_of(node)

    def _make_regular(self, node: Node) -> Term:
        return combined(node, map(self._plain.__getitem__, self._regular_items(node)), self._store)

    def _term(self, root: Node) -> Term:
        """A node with its largest regular parts as lexemes."""
        return self._fold(root, self._full, self._mixed_items, self._make_mixed)

    def _mixed_items(self, node: Node) -> tuple[Node, ...]:
        return () if self._is_regular(node) else items_of(node)

    def _make_mixed(self, node: Node) -> Term:
        if not self._shortest.is_possible(node):
            return self._store.empty
        if self._is_regular(node):
            return self._store.lexeme(self._regular(node))
        if isinstance(node, Reference):
            return self.call(node.name)
        return combined(node, map(self._full.__getitem__, items_of(node)), self._store)

    def _shortest_term(self, root: Node) -> Term:
        """Only the shortest of its texts, or as short ones."""
        return self._fold(root, self._least, self._least_items, self._make_least)

    def _least_items(self, node: Node) -> tuple[Node, ...]:
        if self._shortest.is_nullable(node) or self._is_regular(node):
            return ()
        return (self._shortest.best[node],) if isinstance(node, Choice) else items_of(node)

    def _make_least(self, node: Node) -> Term:
        if self._shortest.is_nullable(node):
            return self._store.epsilon
        if self._is_regular(node) or isinstance(node, Reference):
            return self._term(node)
        inner = [self._least[item] for item in self._least_items(node)]
        if isinstance(node, Repeat):
            return self._store.repeat(inner[0], node.low, node.low)
        return self._store.sequence(*inner)

    def _fold(
        self,
        root: Node,
        known: dict[Node, Term],
        items: Callable[[Node], tuple[Node, ...]],
        make: Callable[[Node], Term],
    ) -> Term:
        """Make the terms of a node and, first, of its items; without recursion."""
        for node in inside_out(root, known.__contains__, items):
            self._store.spend()
            known[node] = make(node)
        return known[root]


def _fits(size: _Size) -> bool:
    return size.nodes <= _LEXEME_NODES and size.depth <= _LEXEME_DEPTH
