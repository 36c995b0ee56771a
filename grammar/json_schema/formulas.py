"""Boolean formulas over rules, with negation already pushed into the rules."""

from __future__ import annotations

from collections.abc import Iterable

from palmette.grammar.json_schema.rules import Rule


class Leaf:
    """One rule holds. Equal leaves are the same object."""

    __slots__ = ("rule",)

    def __init__(self, rule: Rule) -> None:
        self.rule = rule


class And:
    """All of the parts hold."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Leaf | Or, ...]) -> None:
        self.parts = parts


class Or:
    """At least one of the parts holds."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Leaf | And, ...]) -> None:
        self.parts = parts


Formula = bool | Leaf | And | Or


def all_of(formulas: Iterable[Formula]) -> Formula:
    """The conjunction."""
    parts: dict[Leaf | Or, None] = {}
    for formula in formulas:
        if formula is False:
            return False
        if isinstance(formula, And):
            parts.update(dict.fromkeys(formula.parts))
        elif not isinstance(formula, bool):
            parts[formula] = None
    if len(parts) < 2:
        return next(iter(parts), True)
    return And(tuple(parts))


def any_of(formulas: Iterable[Formula]) -> Formula:
    """The disjunction."""
    parts: dict[Leaf | And, None] = {}
    for formula in formulas:
        if formula is True:
            return True
        if isinstance(formula, Or):
            parts.update(dict.fromkeys(formula.parts))
        elif not isinstance(formula, bool):
            parts[formula] = None
    if len(parts) < 2:
        return next(iter(parts), False)
    return Or(tuple(parts))
