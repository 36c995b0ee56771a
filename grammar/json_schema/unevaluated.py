"""Which members or items the subschemas of a place evaluate, case by case.

`unevaluatedProperties` speaks of the members that no subschema that holds has looked at, so what
it says depends on which subschemas hold. Each case comes with what is evaluated in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.json_schema import readers
from palmette.grammar.json_schema.formulas import Formula, all_of, any_of
from palmette.grammar.json_schema.keywords import DRAFT_2019, Type
from palmette.grammar.json_schema.rules import Pattern
from palmette.grammar.json_schema.schemas import ANYTHING, NOTHING, Claim, Schema

if TYPE_CHECKING:
    from palmette.grammar.json_schema.logic import Logic

_MAX_CASES = 1024


class Evaluated(NamedTuple):
    """What has been looked at: members by name, items by place or by what they are."""

    is_all: bool = False
    names: frozenset[str] = frozenset()
    patterns: tuple[Pattern, ...] = ()
    num_items: int = 0  # the first so many
    items: tuple[Claim, ...] = ()  # and those that make one of these true

    def joined(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            self.is_all or other.is_all,
            self.names | other.names,
            tuple(dict.fromkeys(self.patterns + other.patterns)),
            max(self.num_items, other.num_items),
            tuple(dict.fromkeys(self.items + other.items)),
        )


Case = tuple[Formula, Evaluated]

_NONE = Evaluated()


def cases_of(logic: Logic, schema: Schema, kind: Type, *, is_exact: bool) -> list[Case]:
    """The ways in which the schema may hold, but for its own `unevaluated...`.

    A value that is valid in several of them may be put down to any, since a smaller case only
    leaves more unevaluated; unless `is_exact`: then each value is in one case at most.
    """
    return _Cases(logic, kind, is_exact).of_schema(schema)


class _Cases:
    def __init__(self, logic: Logic, kind: Type, is_exact: bool) -> None:
        self.logic = logic
        self.kind = kind
        self.is_exact = is_exact

    def of_schema(self, schema: Schema) -> list[Case]:
        logic = self.logic
        own = logic.own(schema, self.kind)
        if own is False:
            return []
        cases: list[Case] = [(own, self._own(schema))]
        for claim in logic.conjuncts(schema):
            cases = self._both(cases, self._of(claim), schema)
        if schema.has("anyOf"):
            claims = list(logic.branches(schema, "anyOf"))
            cases = self._both(cases, self._any(claims, schema), schema)
        if schema.has("oneOf"):
            claims = list(logic.branches(schema, "oneOf"))
            alone = [
                (all_of((formula, case)), evaluated)
                for index, formula in logic.exactly_one(claims, self.kind)
                for case, evaluated in self._of(claims[index])
            ]
            cases = self._both(cases, alone, schema)
        conditions = logic.conditions(schema)
        if conditions:
            branches = [
                case
                for premise, consequence in conditions
                for case in self._both(self._of(premise), self._of(consequence), schema)
            ]
            cases = self._both(cases, branches, schema)
        if self.kind == "object":
            for trigger, demanded in logic.dependents(schema):
                absent, present = logic.presence(trigger)
                met: list[Case]
                if isinstance(demanded, Claim):
                    met = self._both([(present, _NONE)], self._of(demanded), schema)
                else:
                    met = [(logic.requires((trigger, *demanded)), _NONE)]
                cases = self._both(cases, [(absent, _NONE), *met], schema)
        return cases

    def _own(self, schema: Schema) -> Evaluated:
        below = self.logic.schemas.below
        if self.kind == "object":
            return Evaluated(
                is_all=schema.has("additionalProperties"),
                names=frozenset(readers.mapping(schema, "properties")),
                patterns=tuple(
                    (pattern, schema.where("patternProperties", pattern))
                    for pattern in readers.mapping(schema, "patternProperties")
                ),
            )
        rule = self.logic.array_rule(schema)
        has_rest = schema.has("items")
        if isinstance(schema.get("items"), list):
            has_rest = schema.has("additionalItems")
        counts_contained = schema.has("contains") and schema.dialect is not DRAFT_2019
        return Evaluated(
            is_all=has_rest,
            num_items=len(rule.prefix),
            items=(below(schema, "contains"),) if counts_contained else (),
        )

    def _of(self, claim: Claim) -> list[Case]:
        formula = self.logic.formula(claim, self.kind)
        if formula is False:
            return []
        if not claim.holds or claim is ANYTHING:
            return [(formula, _NONE)]
        schema = claim.schema
        if schema.has("unevaluatedProperties" if self.kind == "object" else "unevaluatedItems"):
            return [(formula, Evaluated(is_all=True))]
        cases = self.of_schema(schema)
        if all(evaluated == _NONE for _, evaluated in cases):
            return [(formula, _NONE)]
        return cases

    def _any(self, claims: Iterable[Claim], schema: Schema) -> list[Case]:
        plain: list[Formula] = []
        chosen: list[tuple[list[Case], list[Claim]]] = [([(True, _NONE)], [])]
        for claim in claims:
            if claim is NOTHING:
                continue
            cases = self._of(claim)
            if all(evaluated == _NONE for _, evaluated in cases):
                plain += (formula for formula, _ in cases)
                continue
            chosen += [(self._both(some, cases, schema), [*left, claim]) for some, left in chosen]
            self._check(len(chosen), schema)
        # In `chosen`, the claims that hold; the first has none of them.
        annotating = chosen[-1][1]
        found: list[Case] = []
        for index, (cases, holding) in enumerate(chosen):
            others: list[Formula] = []
            if index == 0:
                others.append(any_of(plain))
            if self.is_exact:
                others += (
                    self.logic.formula(claim.opposite, self.kind)
                    for claim in annotating
                    if claim not in holding
                )
            found += self._both(cases, [(all_of(others), _NONE)], schema)
        return found

    def _both(self, cases: list[Case], others: list[Case], schema: Schema) -> list[Case]:
        self._check(len(cases) * len(others), schema)
        combined = (
            (all_of((formula, other)), evaluated.joined(other_evaluated))
            for formula, evaluated in cases
            for other, other_evaluated in others
        )
        return [case for case in combined if case[0] is not False]

    def _check(self, count: int, schema: Schema) -> None:
        self.logic.store.spend(count)
        if count > _MAX_CASES:
            keyword = "unevaluatedProperties" if self.kind == "object" else "unevaluatedItems"
            raise GrammarTooComplex(
                f"more than {_MAX_CASES} combinations of branches under {keyword}",
                pointer=schema.pointer,
            )
