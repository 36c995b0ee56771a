"""A context-free grammar as its source says it: rules over words, classes and other rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """One of these texts."""

    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Terminal:
    """A regular term, such as one character of a class."""

    term: Term


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Whatever the rule of that name allows."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One after the other; nothing at all if there are no items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One of them; no text if there are no items."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """At least `low` times and at most `high` times; None is without end."""

    item: Node
    low: int
    high: int | None


Node = Words | Terminal | Reference | Sequence | Choice | Repeat

# A node is told apart from others by identity, and one may stand in several places.


@dataclass(slots=True)
class Grammar:
    """Rules by name. Every reference has its rule."""

    start: str
    rules: dict[str, Node]


def items_of(node: Node) -> tuple[Node, ...]:
    """The nodes right inside a node; a reference has none."""
    if isinstance(node, (Sequence, Choice)):
        return node.items
    return (node.item,) if isinstance(node, Repeat) else ()


def choice(items: Iterable[Node]) -> Node:
    """One of the items. Words among them are put together."""
    others: list[Node] = []
    words: list[Words] = []
    for item in items:
        if isinstance(item, Words):
            words.append(item)
        else:
            others.append(item)
    if len(words) > 1:
        words = [Words(tuple(text for each in words for text in each.texts))]
    listed = (*words, *others)
    return listed[0] if len(listed) == 1 else Choice(listed)


def sequence(items: Iterable[Node]) -> Node:
    """The items one after the other. Repetitions of the same, such as `x? x? x?`, become one."""
    flat: list[Node] = []
    for item in items:
        for each in item.items if isinstance(item, Sequence) else (item,):
            last = flat[-1] if flat else None
            if (
                isinstance(each, Repeat)
                and isinstance(last, Repeat)
                and _are_same(each.item, last.item)
            ):
                unbounded = each.high is None or last.high is None
                high = None if unbounded else (each.high or 0) + (last.high or 0)
                flat[-1] = Repeat(each.item, each.low + last.low, high)
            else:
                flat.append(each)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _are_same(one: Node, other: Node) -> bool:
    """Whether two nodes are obviously the same."""
    if isinstance(one, Words) and isinstance(other, Words):
        return one.texts == other.texts
    if isinstance(one, Terminal) and isinstance(other, Terminal):
        return one.term is other.term
    if isinstance(one, Reference) and isinstance(other, Reference):
        return one.name == other.name
    return one is other


def inside_out(
    root: Node,
    is_known: Callable[[Node], object] = lambda node: False,
    items: Callable[[Node], tuple[Node, ...]] = items_of,
) -> list[Node]:
    """The nodes in and under `root`, each once, after all its `items`; known ones left out.

    Without recursion: grammars are as deep as their author likes.
    """
    order: list[Node] = []
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False)]
    while pending:
        node, is_done = pending.pop()
        if is_done:
            order.append(node)
        elif node not in seen and not is_known(node):
            seen.add(node)
            pending.append((node, True))
            pending.extend((item, False) for item in reversed(items(node)))
    return order


def called(root: Node) -> dict[str, None]:
    """The names of the rules that a node refers to."""
    return {node.name: None for node in inside_out(root) if isinstance(node, Reference)}


def combined(node: Node, inner: Iterable[Term], store: TermStore) -> Term:
    """The term of a node, given those of its items, and of a reference given that of its rule."""
    if isinstance(node, Words):
        return store.words(node.texts)
    if isinstance(node, Terminal):
        return node.term
    if isinstance(node, Choice):
        return store.alternation(inner)
    if isinstance(node, Repeat):
        (item,) = inner
        return store.repeat(item, node.low, node.high)
    return store.sequence(*inner)
