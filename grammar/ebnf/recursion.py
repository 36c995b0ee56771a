"""Takes the left recursion out of a grammar, and turns tail recursion into repetition.

What remains never calls a rule again before it has read something, which is what the machine
asks for. The language is the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from palmette.grammar.ebnf.graph import components, is_circle
from palmette.grammar.ebnf.nodes import (
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Terminal,
    Words,
    choice,
    inside_out,
    sequence,
)
from palmette.grammar.ebnf.shortest import Shortest
from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.term_store import TermStore


def without_left_recursion(
    rules: dict[str, Node], shortest: Shortest, store: TermStore
) -> dict[str, Node]:
    """The rules, and perhaps more of them, none of which begins with itself.

    `shortest` is of the same rules. Direct, mutual and hidden left recursion (behind what may be
    empty) are all seen to.
    """
    return _Remover(rules, shortest, store).remove()


def with_loops(rules: dict[str, Node], store: TermStore) -> dict[str, Node]:
    """The rules, with a repetition in place of calls of a rule by itself at its very end."""
    return {name: _loop(name, root, store) for name, root in rules.items()}


class _Remover:
    def __init__(self, rules: dict[str, Node], shortest: Shortest, store: TermStore) -> None:
        self._rules = rules
        self._shortest = shortest
        self._store = store
        self._some_of: dict[Node, Node] = {}
        self._wanted: list[str] = []  # rules whose variant without the empty text is called
        self._new: dict[str, Node] = {}

    def remove(self) -> dict[str, Node]:
        calls = {name: self._shortest.first_calls(root) for name, root in self._rules.items()}
        self._new = dict(self._rules)
        solved: set[str] = set()
        for names in components(calls):
            if is_circle(names, calls):
                self._solve([name for name in names if name in self._shortest.rule_bytes])
                solved.update(names)
        while self._wanted:
            name = self._wanted.pop()
            if name not in solved:
                solved.add(name)
                self._new[_some_name(name)] = self.some(self._rules[name])
        return self._new

    # The rules of one circle, as linear equations. If A is "B r" or "t", with B a rule of the
    # circle, then to read A is to read some t, and then to go along the r from rule to rule until
    # A is complete: A = t r*, where r* is the closure of a matrix (Rosenkrantz, *Matrix equations
    # and normal forms for context-free grammars*, 1967).

    def _solve(self, names: list[str]) -> None:
        touching = self._touching(names)
        firsts: dict[str, list[Node]] = {}
        ways: dict[str, dict[str, list[Node]]] = {name: {} for name in names}
        for name in names:
            heads = _Heads(self, touching)
            heads.read(self._rules[name], None)
            firsts[name] = heads.others
            for other, rest in heads.calls:
                ways[other].setdefault(name, []).append(Sequence(()) if rest is None else rest)
        self._close(ways)
        starts = {name: choice(nodes) for name, nodes in firsts.items() if nodes}
        for name in names:
            texts = [
                sequence((first, choice(ways[other][name]))) if name in ways[other] else first
                for other, first in starts.items()
                if other == name or name in ways[other]
            ]
            if self._shortest.rule_bytes[name] == 0:
                self._new[_some_name(name)] = choice(texts)
                self._new[name] = Choice((Reference(_some_name(name)), Sequence(())))
            else:
                self._new[name] = choice(texts)

    def _close(self, ways: dict[str, dict[str, list[Node]]]) -> None:
        """From the steps between rules to all ways between them, by elimination."""
        limit = self._store.limits.max_terms
        made = 0
        for pivot in sorted(ways, key=lambda name: len(ways[name])):
            before = {name: choice(row[pivot]) for name, row in ways.items() if pivot in row}
            after = {name: choice(nodes) for name, nodes in ways[pivot].items()}
            loop = before.pop(pivot, None)
            after.pop(pivot, None)
            loops = [] if loop is None else [Repeat(loop, 0, None)]
            for name, to_pivot in before.items():
                ways[name][pivot] = [sequence((to_pivot, *loops))]
                made += len(after)
                if made > limit:  # each is a term later on
                    raise GrammarTooComplex(
                        f"the grammar needs more than {limit} terms to be without left recursion"
                    )
                for other, from_pivot in after.items():
                    self._store.spend(4)
                    way = sequence((to_pivot, *loops, from_pivot))
                    ways[name].setdefault(other, []).append(way)
            if loops:
                ways[pivot][pivot] = [loops[0]]
                for other, from_pivot in after.items():
                    ways[pivot][other] = [sequence((loops[0], from_pivot))]
            # The empty way from a rule to itself is left out where there is no other.
        for name, row in ways.items():
            if name in row:
                row[name] = [*row[name], Sequence(())]

    def _touching(self, names: list[str]) -> set[Node]:
        """The nodes of the rules that may begin with one of the rules."""
        among = set(names)
        touching: set[Node] = set()
        for name in names:
            for node in inside_out(self._rules[name]):
                self._store.spend()
                if isinstance(node, Reference):
                    touches = node.name in among
                elif isinstance(node, Sequence):
                    touches = any(item in touching for item in self._shortest.first_items(node))
                elif isinstance(node, Choice):
                    touches = any(item in touching for item in node.items)
                else:
                    touches = isinstance(node, Repeat) and node.high != 0 and node.item in touching
                if touches and self._shortest.is_possible(node):
                    touching.add(node)
        return touching

    def suffixes(self, node: Sequence, rest: Node | None) -> Iterable[tuple[Node, Node | None]]:
        """Each item before which there may be nothing, and all that follows it."""
        first = list(self._shortest.first_items(node))
        others = node.items[len(first) :]
        after = _join(sequence(others), rest) if others else rest
        found: list[tuple[Node, Node | None]] = []
        for item in reversed(first):
            found.append((item, after))
            after = _join(item, after)
        return reversed(found)

    def some(self, node: Node) -> Node:
        """The texts of the node but for the empty one."""
        if not self._shortest.is_possible(node):
            return Choice(())
        if not self._shortest.is_nullable(node):
            return node
        known = self._some_of.get(node)
        if known is None:
            known = self._some_of[node] = self._make_some(node)
        return known

    def _make_some(self, node: Node) -> Node:
        self._store.spend()
        if isinstance(node, Reference):
            self._wanted.append(node.name)
            return Reference(_some_name(node.name))
        if isinstance(node, Sequence):
            return choice(_join(self.some(item), rest) for item, rest in self.suffixes(node, None))
        if isinstance(node, Choice):
            return choice(map(self.some, node.items))
        if isinstance(node, Repeat) and node.high != 0:
            return Sequence((self.some(node.item), one_less(node)))
        if isinstance(node, Words):
            return Words(tuple(text for text in node.texts if text))
        if isinstance(node, Terminal):
            store = self._store
            return Terminal(store.both(node.term, store.complement(store.epsilon)))
        return Choice(())


class _Heads:
    """How a rule of a circle begins: with another one of it, or with something else."""

    def __init__(self, remover: _Remover, touching: set[Node]) -> None:
        self.calls: list[tuple[str, Node | None]] = []  # a rule, and what follows it
        self.others: list[Node] = []
        self._remover = remover
        self._touching = touching

    def read(self, node: Node, rest: Node | None) -> None:
        """Sort the texts of the node, without the empty one, followed by `rest`."""
        if node not in self._touching:
            self.others.append(_join(self._remover.some(node), rest))
        elif isinstance(node, Reference):
            self.calls.append((node.name, rest))
        elif isinstance(node, Sequence):
            for item, after in self._remover.suffixes(node, rest):
                self.read(item, after)
        elif isinstance(node, Choice):
            for item in node.items:
                self.read(item, rest)
        else:
            assert isinstance(node, Repeat)
            self.read(node.item, _join(one_less(node), rest))


def one_less(node: Repeat) -> Repeat:
    """What may follow the first item of a repetition."""
    return Repeat(node.item, max(node.low - 1, 0), None if node.high is None else node.high - 1)


def _join(node: Node, rest: Node | None) -> Node:
    return node if rest is None else Sequence((node, rest))


def _some_name(name: str) -> str:
    return f"{name}, not empty"


# Tail recursion


def _loop(name: str, root: Node, store: TermStore) -> Node:
    """A rule that is "r itself" or "t" is r* t, if it calls itself nowhere else."""
    calling: set[Node] = set()
    for node in inside_out(root):
        store.spend()
        if isinstance(node, Reference):
            calls = node.name == name
        elif isinstance(node, (Sequence, Choice)):
            calls = any(item in calling for item in node.items)
        else:
            calls = isinstance(node, Repeat) and node.item in calling
        if calls:
            calling.add(node)
    if root not in calling:
        return root
    again: list[Node] = []
    others: list[Node] = []
    pending: list[tuple[tuple[Node, ...], Node]] = [((), root)]
    while pending:
        before, node = pending.pop()
        store.spend(len(before) + 1)
        if node not in calling:
            others.append(sequence((*before, node)))
        elif isinstance(node, Reference):
            again.append(sequence(before))
        elif isinstance(node, Choice):
            pending.extend((before, item) for item in reversed(node.items))
        elif isinstance(node, Sequence):
            *first, last = node.items
            if any(item in calling for item in first):
                return root
            pending.append(((*before, *first), last))
        else:
            assert isinstance(node, Repeat)
            if node.high != 1:
                return root
            if node.low == 0:
                others.append(sequence(before))
            pending.append((before, node.item))
    return sequence((Repeat(choice(again), 0, None), choice(others)))
