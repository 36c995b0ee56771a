"""Which rules call each other in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def components(calls: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected rules, those that are called before those that call them.

    Tarjan, *Depth-first search and linear graph algorithms* (1972), without recursion.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in calls:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        path = [(root, iter(calls[root]))]
        while path:
            name, others = path[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    path.append((other, iter(calls[other])))
                    break
                if other in on_stack:
                    low[name] = min(low[name], index[other])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    low[above] = min(low[above], low[name])
                if low[name] == index[name]:
                    component = [stack.pop()]
                    while component[-1] != name:
                        component.append(stack.pop())
                    on_stack.difference_update(component)
                    found.append(component[::-1])
    return found


def is_circle(names: list[str], calls: Mapping[str, Iterable[str]]) -> bool:
    """Whether the rules of a component call themselves or each other."""
    return len(names) > 1 or names[0] in calls[names[0]]
