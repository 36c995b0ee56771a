"""Random context-free grammars, in two notations, and a slow, obvious recogniser for them."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import strategies as st

NAMES = ["start", "r1", "r2", "r3"]
ALPHABET = "ab"

# A node is ("text", str), ("call", name), ("sequence", [node]), ("choice", [node]) or
# ("repeat", node, low, high or None).
Node = tuple[Any, ...]

leaves = st.one_of(
    st.sampled_from(["a", "b", "ab", "ba", ""]).map(lambda text: ("text", text)),
    st.sampled_from(NAMES).map(lambda name: ("call", name)),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda items: ("sequence", items)),
        st.lists(inner, min_size=2, max_size=3).map(lambda items: ("choice", items)),
        st.tuples(
            st.just("repeat"),
            inner,
            st.integers(0, 2),
            st.sampled_from([None, 0, 1, 2]),
        ).map(lambda each: (*each[:3], None if each[3] is None else each[2] + each[3])),
    ),
    max_leaves=6,
)
grammars = st.lists(nodes, min_size=1, max_size=len(NAMES)).map(
    lambda bodies: dict(zip(NAMES, bodies + [("text", "a")] * len(NAMES), strict=False))
)


def texts(length: int) -> list[str]:
    """Every text of up to `length` letters."""
    return ["".join(each) for size in range(length + 1) for each in product(ALPHABET, repeat=size)]


def derives(grammar: dict[str, Node], text: str) -> bool:
    """Whether the grammar derives the text: spans are added until nothing changes."""
    known: dict[str, set[tuple[int, int]]] = {name: set() for name in grammar}
    places = range(len(text) + 1)

    def spans(node: Node) -> set[tuple[int, int]]:
        kind = node[0]
        if kind == "text":
            return {(i, i + len(node[1])) for i in places if text.startswith(node[1], i)}
        if kind == "call":
            return known[node[1]]
        if kind == "choice":
            return set().union(*map(spans, node[1]))
        if kind == "sequence":
            return join([spans(item) for item in node[1]])
        _, item, low, high = node
        once = spans(item)
        found = join([once] * low)
        reached = found
        for _ in range(len(text) + 1 if high is None else high - low):
            reached = join([reached, once])
            found = found | reached
        return found

    def join(parts: list[set[tuple[int, int]]]) -> set[tuple[int, int]]:
        found = {(i, i) for i in places}
        for part in parts:
            found = {(i, k) for i, j in found for first, k in part if first == j}
        return found

    while True:
        new = {name: spans(body) for name, body in grammar.items()}
        if new == known:
            return (0, len(text)) in known["start"]
        known = new


def as_gbnf(grammar: dict[str, Node]) -> str:
    return "\n".join(f"{name} ::= {_gbnf(body)}" for name, body in grammar.items())


def _gbnf(node: Node) -> str:
    kind = node[0]
    if kind == "text":
        return f'"{node[1]}"'
    if kind == "call":
        return str(node[1])
    if kind == "choice":
        return f"({' | '.join(map(_gbnf, node[1]))})"
    if kind == "sequence":
        return f"({' '.join(map(_gbnf, node[1]))})"
    bounds = f"{{{node[2]},{'' if node[3] is None else node[3]}}}"
    return f"({_gbnf(node[1])}){bounds}"


def as_lark(grammar: dict[str, Node]) -> str:
    """The same in Lark; an empty text is written as nothing, since Lark has no empty terminals."""
    return "\n".join(f"{name}: {_lark(body)}" for name, body in grammar.items())


def _lark(node: Node) -> str:
    kind = node[0]
    if kind == "text":
        return f'"{node[1]}"' if node[1] else "()"
    if kind == "call":
        return str(node[1])
    if kind == "choice":
        return f"({' | '.join(map(_lark, node[1]))})"
    if kind == "sequence":
        return f"({' '.join(map(_lark, node[1]))})"
    _, item, low, high = node
    inner = f"({_lark(item)})"
    if high is None:
        return f"({inner} ~ {low} {inner}*)" if low else f"{inner}*"
    return f"({inner} ~ {low}..{high})"
