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
    is_lazy: bool = False  # which changes nothing about what matches


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


def literal_of(node: Node) -> str | None:
    """The only text that it matches, if that is plain from its form."""
    if isinstance(node, Characters):
        ranges = node.set.ranges
        is_single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        return chr(ranges[0][0]) if is_single else None
    if not isinstance(node, Sequence):
        return None
    texts = [literal_of(item) if isinstance(item, Characters) else None for item in node.items]
    return None if None in texts else "".join(filter(None, texts))


def is_assertion(node: Node) -> bool:
    """Whether it is one itself: it matches nothing but looks at what is around."""
    return isinstance(node, (Begin, End, LookAhead, LookBehind))


def asserts(node: Node) -> bool:
    """Whether there is an assertion in it."""
    return is_assertion(node) or any(map(asserts, children(node)))
