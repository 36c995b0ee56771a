"""The syntax tree of a regular expression."""

from __future__ import annotations

from dataclasses import dataclass

from palmette.grammar.codepoints import CodePoints


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


@dataclass(frozen=True, slots=True)
class LookBehind:
    """What is before ends with `item`, or does not."""

    item: Node
    is_negative: bool


Node = Characters | Sequence | Choice | Repeat | Begin | End | LookAhead | LookBehind


def word_boundary(word: CodePoints, is_negative: bool) -> Node:
    """Between a character of `word` and none, or (negative) anywhere else."""
    one = Characters(word)
    return Choice(
        tuple(
            Sequence((LookBehind(one, is_after), LookAhead(one, is_after == is_negative)))
            for is_after in (False, True)
        )
    )


def children(node: Node) -> tuple[Node, ...]:
    """The nodes of which it is made."""
    if isinstance(node, (Sequence, Choice)):
        return node.items
    return (node.item,) if isinstance(node, (Repeat, LookAhead, LookBehind)) else ()


def is_assertion(node: Node) -> bool:
    """Whether it is one itself: it matches nothing but looks at what is around."""
    return isinstance(node, (Begin, End, LookAhead, LookBehind))


def asserts(node: Node) -> bool:
    """Whether there is an assertion in it."""
    return is_assertion(node) or any(map(asserts, children(node)))
