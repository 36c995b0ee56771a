"""What follows from a claim, type by type: a formula over rules, and its cases.

Negation is pushed inwards: `not`, `if` and `oneOf` become conjunctions and disjunctions of rules
and of refuted rules. A claim about another place (the value of a member, an item) stays a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal

from palmette.grammar.errors import (
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.json_schema import readers
from palmette.grammar.json_schema.document import Json, as_spent, identity
from palmette.grammar.json_schema.formats import PATTERNS
from palmette.grammar.json_schema.formulas import And, Formula, Leaf, Or, all_of, any_of
from palmette.grammar.json_schema.keywords import ALL_TYPES, Type
from palmette.grammar.json_schema.numbers import Bounds, NumberRule
from palmette.grammar.json_schema.policy import DEFAULT_POLICY, Policy
from palmette.grammar.json_schema.rules import (
    ArrayRule,
    Count,
    Demand,
    ObjectRule,
    Pattern,
    Rule,
    Values,
    merged,
)
from palmette.grammar.json_schema.schemas import (
    ANYTHING,
    CANONICAL,
    NOTHING,
    Claim,
    Key,
    Schema,
    Schemas,
    key_of,
)
from palmette.grammar.json_schema.strings import StringRule, Strings
from palmette.grammar.json_schema.unevaluated import Evaluated, cases_of

# A quick look follows members inside members so far, and tries so many cases.
_QUICK_DEPTH = 3
_QUICK_CASES = 64
_COMPARED_CASES = 200

Conjunction = tuple[Rule, ...]


class Logic:
    """Formulas of claims, and the cases of keys."""

    def __init__(
        self,
        schemas: Schemas,
        strings: Strings,
        max_cases: int,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        self.schemas = schemas
        self.strings = strings
        self.store = strings.store
        self._max_cases = max_cases
        self._is_closing = policy.undeclared == "forbidden"
        self._conjunctions: dict[tuple[Key, Type], list[Conjunction]] = {}
        self._void: dict[Key, bool] = {}
        self._presence: dict[str, tuple[Leaf, Leaf]] = {}
        self._depth = 0  # of quick looks inside each other

    # Formulas

    def formula(self, claim: Claim, kind: Type) -> Formula:
        """What the claim says of values of that type."""
        if claim is ANYTHING or claim is NOTHING:
            return claim is ANYTHING
        if claim is CANONICAL:
            return True
        schema = claim.schema
        if schema.error is not None:
            raise schema.error
        key = (kind, claim.holds)
        found = schema.formulas.get(key)
        if found is None:
            opened = schema.is_open.get(key)
            if opened is not None:
                if opened < self._depth:
                    raise _NotKnownYetError
                raise InvalidGrammar(
                    "the schema refers to itself without end", pointer=schema.pointer
                )
            if claim.holds and not _allows(schema, kind):
                schema.formulas[key] = False
                return False
            self.store.spend(12)
            schema.is_open[key] = self._depth
            try:
                make = self._positive if claim.holds else self._negative
                found = schema.formulas[key] = make(schema, kind)
            finally:
                del schema.is_open[key]
        assert isinstance(found, (bool, Leaf, And, Or))
        return found

    def formula_of(self, key: Key, kind: Type) -> Formula:
        """What all the claims together say of values of that type."""
        if len(key) == 1:
            return self.formula(key[0], kind)
        return all_of(self.formula(claim, kind) for claim in key)

    def own(self, schema: Schema, kind: Type) -> Formula:
        """What the keywords say that name no other schema for the same value."""
        if not _allows(schema, kind):
            return False
        parts: list[Formula] = []
        values = readers.values(schema)
        if values is not None:
            self.store.spend(len(values) // 4)
            listed = [value for value in values if type_of(value) == kind]
            if not listed:
                return False
            if kind != "null":
                parts.append(Leaf(Values(as_spent(listed, self.store.spend))))
        rule = self._rule(schema, kind)
        if rule is not None:
            parts.append(Leaf(rule))
        return all_of(parts)

    def conjuncts(self, schema: Schema) -> list[Claim]:
        """The claims about the same value that always hold with the schema's."""
        claims = list(self.branches(schema, "allOf"))
        claims += [
            self.schemas.referred(schema, keyword)
            for keyword in ("$ref", "$dynamicRef", "$recursiveRef")
            if schema.has(keyword)
        ]
        if schema.has("not"):
            claims.append(self.schemas.below(schema, "not").opposite)
        return claims

    def branches(self, schema: Schema, keyword: str) -> Iterator[Claim]:
        """That each of the schemas holds which `allOf`, `anyOf` or `oneOf` lists."""
        for index in range(len(readers.schema_list(schema, keyword))):
            yield self.schemas.below(schema, keyword, index)

    def conditions(self, schema: Schema) -> list[tuple[Claim, Claim]]:
        """Claims that exclude each other, and what follows from each; none without `if`."""
        if not schema.has("if"):
            return []
        below = self.schemas.below
        condition = below(schema, "if")
        return [
            (condition, below(schema, "then") if schema.has("then") else ANYTHING),
            (condition.opposite, below(schema, "else") if schema.has("else") else ANYTHING),
        ]

    def dependents(self, schema: Schema) -> list[tuple[str, Claim | tuple[str, ...]]]:
        """Names of members, and what must hold, or which must be there, where they are."""
        found: list[tuple[str, Claim | tuple[str, ...]]] = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for trigger, value in readers.mapping(schema, keyword).items():
                is_old = keyword == "dependencies"
                if keyword == "dependentSchemas" or (is_old and isinstance(value, (dict, bool))):
                    found.append((trigger, self.schemas.below(schema, keyword, trigger)))
                    continue
                listed = [value] if is_old and isinstance(value, str) else value
                where = schema.where(keyword, trigger)
                found.append((trigger, tuple(readers.names(listed, where, keyword))))
        return found

    def presence(self, name: str) -> tuple[Leaf, Leaf]:
        """That a member is not there, and that it is."""
        leaves = self._presence.get(name)
        if leaves is None:
            absent = Leaf(ObjectRule(members={name: NOTHING}))
            leaves = self._presence[name] = (absent, Leaf(ObjectRule(required=(name,))))
        return leaves

    def requires(self, names: Sequence[str]) -> Formula:
        """That all these members are there."""
        return all_of(self.presence(name)[1] for name in names)

    def exactly_one(self, claims: Sequence[Claim], kind: Type) -> list[tuple[int, Formula]]:
        """For each claim that may hold alone, its index, and that it does."""
        formulas: dict[int, Formula] = {
            index: formula
            for index, claim in enumerate(claims)
            if (formula := self.formula(claim, kind)) is not False
        }
        if len(formulas) < 2:
            return list(formulas.items())
        always = [index for index, formula in formulas.items() if formula is True]
        if always:  # none of the others holds alone
            others = (claims[index].opposite for index in formulas if index != always[0])
            none = all_of(self.formula(claim, kind) for claim in others)
            return [] if len(always) > 1 else [(always[0], none)]
        rivals = self._rivals(formulas, kind)
        self.store.spend(sum(map(len, rivals.values())))
        return [
            (
                index,
                all_of(
                    (
                        formula,
                        *(self.formula(claims[rival].opposite, kind) for rival in rivals[index]),
                    )
                ),
            )
            for index, formula in formulas.items()
        ]

    def _positive(self, schema: Schema, kind: Type) -> Formula:
        own = self.own(schema, kind)
        if own is False:
            return False
        claim = self._claim_on_rest(schema, kind)
        if claim is not ANYTHING:
            return any_of(
                all_of((formula, self._rest_holds(evaluated, claim, kind)))
                for formula, evaluated in cases_of(self, schema, kind, is_exact=False)
            )
        return self._all_but_rest(schema, kind, own)

    def _all_but_rest(self, schema: Schema, kind: Type, own: Formula) -> Formula:
        if _COMBINING.isdisjoint(schema.value):
            return own
        return all_of((own, *self._combined(schema, kind)))

    def _combined(self, schema: Schema, kind: Type) -> Iterator[Formula]:
        """What references and combinators say."""
        formula = self.formula
        for claim in self.conjuncts(schema):
            yield formula(claim, kind)
        if schema.has("anyOf"):
            yield any_of(formula(claim, kind) for claim in self.branches(schema, "anyOf"))
        if schema.has("oneOf"):
            claims = list(self.branches(schema, "oneOf"))
            yield any_of(alone for _, alone in self.exactly_one(claims, kind))
        conditions = self.conditions(schema)
        if any(consequence is not ANYTHING for _, consequence in conditions):
            yield any_of(
                all_of((formula(premise, kind), formula(consequence, kind)))
                for premise, consequence in conditions
            )
        if kind == "object":
            for trigger, demanded in self.dependents(schema):
                absent, present = self.presence(trigger)
                follows = (
                    formula(demanded, kind)
                    if isinstance(demanded, Claim)
                    else self.requires(demanded)
                )
                yield any_of((absent, all_of((present, follows))))

    def _negative(self, schema: Schema, kind: Type) -> Formula:
        if not _allows(schema, kind):
            return True
        refuted = any_of(self._refutations(schema, kind))
        claim = self._claim_on_rest(schema, kind)
        if claim is ANYTHING or refuted is True:
            return refuted
        some = (
            all_of((formula, self._rest_fails(evaluated, claim, kind)))
            for formula, evaluated in cases_of(self, schema, kind, is_exact=True)
        )
        return any_of((refuted, *some))

    def _refutations(self, schema: Schema, kind: Type) -> Iterator[Formula]:
        """Each way in which the schema, but for `unevaluated...`, may fail to hold."""
        formula = self.formula
        values = readers.values(schema)
        if values is not None:
            yield self._none_of([value for value in values if type_of(value) == kind], kind, schema)
        yield from self._rule_refutations(schema, kind)
        for claim in self.conjuncts(schema):
            yield formula(claim.opposite, kind)
        if schema.has("anyOf"):
            yield all_of(formula(claim.opposite, kind) for claim in self.branches(schema, "anyOf"))
        if schema.has("oneOf"):
            claims = list(self.branches(schema, "oneOf"))
            yield all_of(formula(claim.opposite, kind) for claim in claims)
            self.store.spend(len(claims) ** 2)
            yield any_of(
                all_of((formula(one, kind), formula(other, kind)))
                for index, one in enumerate(claims)
                for other in claims[:index]
            )
        for premise, consequence in self.conditions(schema):
            if consequence is not ANYTHING:
                yield all_of((formula(premise, kind), formula(consequence.opposite, kind)))
        if kind == "object":
            for trigger, demanded in self.dependents(schema):
                absent_or = (
                    formula(demanded.opposite, kind)
                    if isinstance(demanded, Claim)
                    else any_of(self.presence(name)[0] for name in demanded)
                )
                yield all_of((self.presence(trigger)[1], absent_or))

    # Single keywords, and their opposites

    def _rule(self, schema: Schema, kind: Type) -> Rule | None:
        if kind == "number":
            number_rule = self._number_rule(schema)
            return None if number_rule == _ANY_NUMBER else number_rule
        if kind == "string":
            string_rule = self._string_rule(schema)
            return None if string_rule == _ANY_STRING else string_rule
        if kind == "array":
            array_rule = self.array_rule(schema)
            return None if array_rule.is_idle else array_rule
        if kind == "object":
            object_rule = self._object_rule(schema)
            is_told = self._is_closing and object_rule.is_open
            return None if object_rule.is_idle and not is_told else object_rule
        return None

    def _rule_refutations(self, schema: Schema, kind: Type) -> Iterator[Formula]:
        if kind == "number":
            yield from map(Leaf, _not_number(self._number_rule(schema)))
        elif kind == "string":
            yield from map(Leaf, _not_string(self._string_rule(schema)))
        elif kind == "array":
            yield from map(Leaf, _not_array(self.array_rule(schema)))
        elif kind == "object":
            rule = self._object_rule(schema)
            yield from (self.presence(name)[0] for name in rule.required)
            yield from map(Leaf, _not_object(rule))

    def _none_of(self, values: list[Json], kind: Type, schema: Schema) -> Formula:
        if not values:
            return True
        if kind == "null":
            return False
        if kind == "boolean":
            others = [value for value in (True, False) if value not in values]
            return Leaf(Values(others)) if others else False
        if kind == "number":
            return Leaf(NumberRule(excluded=tuple(Values(values).values)))
        if kind == "string":
            return Leaf(StringRule(excluded=tuple(dict.fromkeys(values))))
        where = schema.where("const" if schema.has("const") else "enum")
        return all_of(
            self.formula(self.schemas.constant(value, where).opposite, kind) for value in values
        )

    def _number_rule(self, schema: Schema) -> NumberRule:
        types = schema.types
        is_integer = types is not None and "number" not in types
        if _OF_NUMBERS.isdisjoint(schema.value):
            return _ANY_INTEGER if is_integer else _ANY_NUMBER
        multiple = readers.multiple_of(schema)
        return NumberRule(
            bounds=readers.bounds(schema),
            multiples=() if multiple is None else (multiple,),
            kind="integer" if is_integer else "any",
        )

    def _string_rule(self, schema: Schema) -> StringRule:
        if _OF_STRINGS.isdisjoint(schema.value):
            return _ANY_STRING
        pattern = readers.text(schema, "pattern")
        name = readers.text(schema, "format")
        if name is not None and name not in PATTERNS:
            self.schemas.notes[
                f"{schema.where('format')}: the format {name!r} is unknown and constrains nothing"
            ] = None
            name = None
        return StringRule(
            min_length=readers.count(schema, "minLength") or 0,
            max_length=readers.count(schema, "maxLength"),
            patterns=() if pattern is None else ((pattern, schema.where("pattern")),),
            formats=() if name is None else (name,),
        )

    def array_rule(self, schema: Schema) -> ArrayRule:
        """What the keywords for arrays say."""
        if _OF_ARRAYS.isdisjoint(schema.value):
            return _ANY_ARRAY
        below = self.schemas.below
        prefix: list[Claim] = []
        rest_keyword = "items"
        list_keyword = "prefixItems"
        if isinstance(schema.get("items"), list):
            if not schema.dialect.has_item_lists or schema.has("prefixItems"):
                raise InvalidGrammar(
                    "a list of schemas is spelled prefixItems", pointer=schema.where("items")
                )
            list_keyword, rest_keyword = "items", "additionalItems"
            listed = schema.value["items"]
        else:
            listed = readers.schema_list(schema, "prefixItems")
        prefix = [below(schema, list_keyword, index) for index in range(len(listed))]
        counts: tuple[Count, ...] = ()
        if schema.has("contains"):
            least = readers.count(schema, "minContains")
            least = 1 if least is None else least
            counts = (
                Count(below(schema, "contains"), least, readers.count(schema, "maxContains")),
            )
        return ArrayRule(
            prefix=tuple(prefix),
            rest=below(schema, rest_keyword) if schema.has(rest_keyword) else ANYTHING,
            low=readers.count(schema, "minItems") or 0,
            high=readers.count(schema, "maxItems"),
            counts=counts,
            unique=schema.where("uniqueItems") if readers.flag(schema, "uniqueItems") else None,
        )

    def _object_rule(self, schema: Schema) -> ObjectRule:
        if _OF_OBJECTS.isdisjoint(schema.value):
            return _ANY_OBJECT
        below = self.schemas.below
        additional = "additionalProperties"
        is_listing = bool(readers.mapping(schema, "properties"))
        return ObjectRule(
            members=self.schemas.each_below(schema, "properties") if is_listing else {},
            patterns=tuple(
                (
                    (pattern, schema.where("patternProperties", pattern)),
                    below(schema, "patternProperties", pattern),
                )
                for pattern in readers.mapping(schema, "patternProperties")
            ),
            others=below(schema, additional) if schema.has(additional) else ANYTHING,
            names=below(schema, "propertyNames") if schema.has("propertyNames") else ANYTHING,
            required=tuple(
                readers.names(schema.value["required"], schema.where("required"), "required")
                if schema.has("required")
                else ()
            ),
            low=readers.count(schema, "minProperties") or 0,
            high=readers.count(schema, "maxProperties"),
            is_listing=is_listing,
            is_open=any(map(schema.has, _OF_OTHERS)),
        )

    def _claim_on_rest(self, schema: Schema, kind: Type) -> Claim:
        """What `unevaluatedProperties` or `unevaluatedItems` claims."""
        keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(kind)
        if keyword is None or not schema.has(keyword):
            return ANYTHING
        return self.schemas.below(schema, keyword)

    def _rest_holds(self, evaluated: Evaluated, claim: Claim, kind: Type) -> Formula:
        if evaluated.is_all:
            return True
        if kind == "object":
            return Leaf(
                ObjectRule(
                    members=dict.fromkeys(sorted(evaluated.names), ANYTHING),
                    patterns=tuple((pattern, ANYTHING) for pattern in evaluated.patterns),
                    others=claim,
                    is_open=True,
                )
            )
        rest = self.schemas.any_of((*evaluated.items, claim), claim.schema.pointer)
        if rest is ANYTHING:
            return True
        return Leaf(ArrayRule(prefix=(ANYTHING,) * evaluated.num_items, rest=rest))

    def _rest_fails(self, evaluated: Evaluated, claim: Claim, kind: Type) -> Formula:
        holds = self._rest_holds(evaluated, claim, kind)
        if not isinstance(holds, Leaf):
            return not holds
        if isinstance(holds.rule, ObjectRule):
            return any_of(map(Leaf, _not_object(holds.rule)))
        assert isinstance(holds.rule, ArrayRule)
        return any_of(map(Leaf, _not_array(holds.rule)))

    # Values

    def holds(self, claim: Claim, value: Json) -> bool:
        """Whether the claim is true of the value."""
        return self._holds(self.formula(claim, type_of(value)), value)

    def _holds(self, formula: Formula, value: Json) -> bool:
        if isinstance(formula, bool):
            return formula
        if isinstance(formula, Leaf):
            return self.rule_holds(formula.rule, value)
        if isinstance(formula, And):
            return all(self._holds(part, value) for part in formula.parts)
        return any(self._holds(part, value) for part in formula.parts)

    def rule_holds(self, rule: Rule, value: Json) -> bool:
        """Whether the rule, which speaks of values of that type, holds."""
        if isinstance(rule, Values):
            return identity(value) in rule.identities
        if isinstance(rule, NumberRule):
            self.store.spend(1 + len(rule.excluded) // 32)
            return rule.holds(value)
        if isinstance(rule, StringRule):
            return self.strings.holds(rule, value)
        if len(value) < rule.low or (rule.high is not None and len(value) > rule.high):
            return False
        if isinstance(rule, ArrayRule):
            return self._array_holds(rule, value)
        return self._object_holds(rule, value)

    def _array_holds(self, rule: ArrayRule, value: list[Json]) -> bool:
        for count in rule.counts:
            num_true = sum(self.holds(count.claim, item) for item in value[count.start :])
            if num_true < count.low or (count.high is not None and num_true > count.high):
                return False
        if rule.unique and len(set(map(identity, value))) < len(value):
            return False
        return all(self.holds(rule.at(index), item) for index, item in enumerate(value))

    def _object_holds(self, rule: ObjectRule, value: dict[str, Json]) -> bool:
        if not all(name in value for name in rule.required):
            return False
        for name, member in value.items():
            if not all(self.holds(claim, member) for claim in self.claims_on(rule, name)):
                return False
        return all(
            any(
                self.is_met_by(demand, name) and self.holds(demand.value, member)
                for name, member in value.items()
            )
            for demand in rule.demands
        )

    def claims_on(self, rule: ObjectRule, name: str) -> list[Claim]:
        """What the rule says of the value of a member of that name."""
        self.store.spend(1 + len(rule.patterns))
        if rule.names is not ANYTHING and not self.holds(rule.names, name):
            return [NOTHING]
        claims = [claim for pattern, claim in rule.patterns if self.matches(pattern, name)]
        if name in rule.members:
            return [rule.members[name], *claims]
        return claims or [rule.others]

    def is_met_by(self, demand: Demand, name: str) -> bool:
        """Whether a member of that name may be the one demanded."""
        if demand.pattern is not None and not self.matches(demand.pattern, name):
            return False
        if name in demand.outside.names:
            return False
        if any(self.matches(pattern, name) for pattern in demand.outside.patterns):
            return False
        return demand.name is ANYTHING or self.holds(demand.name, name)

    def matches(self, pattern: Pattern, name: str) -> bool:
        """Whether a pattern matches somewhere in a name."""
        return self.strings.matches(*pattern, name)

    # Cases

    def kinds(self, key: Key) -> Sequence[Type]:
        """The types of values of which the claims may be true, as far as the first one tells."""
        if key and key[0].holds:
            schema = key[0].schema
            if schema.types is not None and schema.error is None:
                return [kind for kind in ALL_TYPES if _allows(schema, kind)]
        return ALL_TYPES

    def conjunctions(self, key: Key, kind: Type) -> list[Conjunction]:
        """Conjunctions of rules, of which one holds for each value that makes all claims true.

        Those that obviously contradict themselves, or are part of another, are left out.
        """
        found = self._conjunctions.get((key, kind))
        if found is None:
            found = []
            cases: list[frozenset[Leaf]] = []
            formula = self.formula_of(key, kind)
            if formula is False:
                self._conjunctions[key, kind] = found
                return found
            for leaves in self._cases(formula):
                if len(cases) < _COMPARED_CASES:
                    self.store.spend(len(cases) // 8)
                    case = frozenset(leaves)
                    if any(other <= case for other in cases):
                        continue
                    cases.append(case)
                found.append(tuple(leaf.rule for leaf in leaves))
                self.store.hold(8 * len(leaves))
                if len(found) > self._max_cases:
                    raise GrammarTooComplex(
                        f"more than {self._max_cases} combinations of branches",
                        pointer=key[0].schema.pointer if key else "#",
                    )
            self._conjunctions[key, kind] = found
        return found

    def listed(self, case: Sequence[Rule], kind: Type) -> Iterator[Json] | None:
        """The values for which all of the case holds; None if it has no list of them."""
        lists = [rule for rule in case if isinstance(rule, Values)]
        if not lists:
            constants = _CONSTANTS.get(kind)
            return None if constants is None else iter(constants)
        shortest = min(lists, key=lambda each: len(each.values))
        others = [rule for rule in case if rule is not shortest]
        self.store.spend(len(shortest.values) * len(others) // 2)
        return (
            value
            for value in shortest.values
            if all(self.rule_holds(rule, value) for rule in others)
        )

    def is_void(self, key: Key) -> bool:
        """Whether nothing makes all claims true, as far as a quick look can tell."""
        known = self._void.get(key)
        if known is not None:
            return known
        if not key:
            return False
        result = self._quickly(
            lambda: all(self._is_void_for(self.formula_of(key, kind), kind) for kind in ALL_TYPES)
        )
        if result or (result is False and self._depth == 0):
            self._void[key] = result
        return bool(result)

    def _quickly(self, look: Callable[[], bool]) -> bool | None:
        """What a quick look finds; None if that is not known, or refused if it is ever needed."""
        if self._depth >= _QUICK_DEPTH:
            return None
        self._depth += 1
        try:
            return look()
        except (_NotKnownYetError, InvalidGrammar, UnsupportedGrammar):
            return None
        finally:
            self._depth -= 1

    def _is_void_for(self, formula: Formula, kind: Type) -> bool:
        if isinstance(formula, bool):
            return not formula
        cases = self._cases(formula)
        for _ in range(_QUICK_CASES):
            case = next(cases, None)
            if case is None:
                return True
            if not self._is_empty(case, kind):
                return False
        return False

    def _is_empty(self, leaves: Iterable[Leaf], kind: Type) -> bool:
        """Whether a conjunction about scalars is obviously empty."""
        if kind not in ("number", "string", "boolean"):
            return False
        rules = [leaf.rule for leaf in leaves]
        listed = self.listed(rules, kind)
        if listed is not None:
            return not any(True for _ in listed)
        if kind == "number":
            return merged(NumberRule, rules).bounds.is_empty
        string = merged(StringRule, rules)
        return string.max_length is not None and string.max_length < string.min_length

    def _cases(self, formula: Formula) -> Iterator[tuple[Leaf, ...]]:
        """Leaves that make the formula true when they all hold, in every way that matters.

        Among the choices that are left the one with the fewest options is made first, so that dead
        ends show early; the leaves come in the order of the formula all the same.
        """
        if formula is True:
            yield ()
            return
        if isinstance(formula, Leaf) and _is_possible(formula.rule):
            yield (formula,)
            return
        start = _Case()
        if not self._assume(start, formula, ()):
            return
        pending = [start]
        steps = 0
        while pending:
            case = pending.pop()
            self.store.spend(8 + len(case.choices) + len(case.leaves))
            steps += 1
            if steps > 8 * self._max_cases:
                raise GrammarTooComplex(f"more than {self._max_cases} combinations of branches")
            case.choices = {
                choice: path
                for choice, path in case.choices.items()
                if not self._is_made(choice, case)
            }
            if not case.choices:
                yield tuple(sorted(case.leaves, key=case.leaves.__getitem__))
                continue
            choice = min(case.choices, key=lambda each: len(each.parts))
            path = case.choices.pop(choice)
            options = []
            for option in choice.parts:
                branch = case.copy()
                if self._assume(branch, option, path):
                    options.append(branch)
            pending.extend(reversed(options))

    def _assume(self, case: _Case, formula: Formula, path: tuple[int, ...]) -> bool:
        """Add to a case what stands at `path` of a formula; False if that contradicts it."""
        if isinstance(formula, bool):
            return formula
        parts = formula.parts if isinstance(formula, And) else (formula,)
        for index, part in enumerate(parts):
            here = (*path, index)
            if isinstance(part, Or):
                case.choices.setdefault(part, here)
            elif part not in case.leaves and not self._admit(case, part, here):
                return False
        return True

    def _is_made(self, choice: Or, case: _Case) -> bool:
        """Whether one of the options follows from what is assumed."""
        return any(
            self._follows(part, case)
            if isinstance(part, Leaf)
            else all(isinstance(each, Leaf) and self._follows(each, case) for each in part.parts)
            for part in choice.parts
        )

    def _follows(self, leaf: Leaf, case: _Case) -> bool:
        if leaf in case.leaves:
            return True
        if not isinstance(leaf.rule, ObjectRule) or leaf.rule.about is None:
            return False
        name, claim = leaf.rule.about
        key = case.required.get(name)
        if key is None:
            return False
        opposed = key_of((*key, claim.opposite))
        return opposed is None or self.is_void(opposed)

    def _admit(self, case: _Case, leaf: Leaf, path: tuple[int, ...]) -> bool:
        rule = leaf.rule
        case.leaves[leaf] = path
        if isinstance(rule, Values):
            known = case.identities
            case.identities = rule.identities if known is None else known & rule.identities
            return bool(case.identities)
        if isinstance(rule, (ArrayRule, ObjectRule)):
            case.low = max(case.low, rule.low)
            if rule.high is not None:
                case.high = rule.high if case.high is None else min(case.high, rule.high)
            if case.high is not None and case.low > case.high:
                return False
        return not isinstance(rule, ObjectRule) or self._admit_members(case, rule)

    def _admit_members(self, case: _Case, rule: ObjectRule) -> bool:
        """Whether every required member still has a value."""
        self.store.spend((1 + len(case.rules)) * len(rule.required) // 4)
        touched = case.required if rule.is_wide else case.required.keys() & rule.members.keys()
        changed: dict[str, list[Claim]] = {
            name: [*case.required[name], *self.claims_on(rule, name)] for name in touched
        }
        case.rules.append(rule)
        for name in rule.required:
            if name not in case.required:
                speaking = [each for each in case.rules if each.is_wide or name in each.members]
                changed[name] = [c for each in speaking for c in self.claims_on(each, name)]
        self.store.spend(len(changed))
        for name, claims in changed.items():
            key = key_of(claims)
            if key is None:
                return False
            if key != case.required.get(name):
                case.required[name] = key
                if len(key) > 1 and self.is_void(key):
                    return False
        return case.high is None or len(case.required) <= case.high

    # Which branches of oneOf may hold together

    def _rivals(self, formulas: dict[int, Formula], kind: Type) -> dict[int, list[int]]:
        """For each formula, those that may hold at the same time."""
        rivals: dict[int, list[int]] = {index: [] for index in formulas}
        if len(formulas) > 2 and self._quickly(lambda: self._are_told_apart(formulas)):
            return rivals
        indices = list(formulas)
        for place, index in enumerate(indices):
            for other in indices[place + 1 :]:
                if self._may_both_hold(formulas[index], formulas[other], kind):
                    rivals[index].append(other)
                    rivals[other].append(index)
        return rivals

    def _may_both_hold(self, one: Formula, other: Formula, kind: Type) -> bool:
        self.store.spend(4)
        return not self._quickly(lambda: self._is_void_for(all_of((one, other)), kind))

    def _are_told_apart(self, formulas: dict[int, Formula]) -> bool:
        """Whether their values, or those of one required member, are lists without overlap."""
        owners: dict[str | None, dict[object, int]] = {}
        is_first = True
        for index, formula in formulas.items():
            for number, case in enumerate(self._cases(formula)):
                if number == _QUICK_CASES:
                    return False
                told = self._literals(case, None if is_first else owners.keys())
                for name, identities in told.items():
                    known = owners.setdefault(name, {})
                    if any(known.setdefault(each, index) != index for each in identities):
                        del owners[name]
                for name in [name for name in owners if name not in told]:
                    del owners[name]
                is_first = False
                if not owners:
                    return False
        return True

    def _literals(
        self, leaves: Iterable[Leaf], wanted: Iterable[str | None] | None
    ) -> dict[str | None, frozenset[object]]:
        """Identities of all values (None), and of those of required members, where listed."""
        found: dict[str | None, frozenset[object]] = {}
        rules = [leaf.rule for leaf in leaves]
        for rule in rules:
            if isinstance(rule, Values):
                known = found.get(None)
                found[None] = rule.identities if known is None else known & rule.identities
        objects = [rule for rule in rules if isinstance(rule, ObjectRule)]
        required = dict.fromkeys(name for rule in objects for name in rule.required)
        for name in required:
            if wanted is not None and name not in wanted:
                continue
            key = key_of(c for rule in objects for c in self.claims_on(rule, name))
            identities = None if key is None else self._identities(key)
            if identities is not None:
                found[name] = identities
        return found

    def _identities(self, key: Key) -> frozenset[object] | None:
        """Identities of values that hold all that make the claims true; None if not listed."""
        identities: frozenset[object] = frozenset()
        for kind in ALL_TYPES:
            formula = self.formula_of(key, kind)
            if formula is False:
                continue
            if kind == "null":
                identities |= {identity(None)}
                continue
            parts = formula.parts if isinstance(formula, And) else (formula,)
            listed = [
                part.rule.identities
                for part in parts
                if isinstance(part, Leaf) and isinstance(part.rule, Values)
            ]
            if not listed:
                return None
            identities |= min(listed, key=len)
        return identities


class _Case:
    """Leaves that are assumed to hold, and what still has a choice."""

    __slots__ = ("choices", "high", "identities", "leaves", "low", "required", "rules")

    def __init__(self) -> None:
        # With the places in the formula where they stand.
        self.leaves: dict[Leaf, tuple[int, ...]] = {}
        self.choices: dict[Or, tuple[int, ...]] = {}
        self.identities: frozenset[object] | None = None
        self.low = 0
        self.high: int | None = None
        self.rules: list[ObjectRule] = []
        self.required: dict[str, Key] = {}

    def copy(self) -> _Case:
        other = _Case()
        other.leaves = dict(self.leaves)
        other.choices = dict(self.choices)
        other.identities = self.identities
        other.low, other.high = self.low, self.high
        other.rules = list(self.rules)
        other.required = dict(self.required)
        return other


# Without a keyword of these, a schema says nothing of values of a type.
_OF_NUMBERS = frozenset(
    ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
)
_OF_STRINGS = frozenset({"pattern", "format", "minLength", "maxLength"})
_OF_ARRAYS = frozenset(
    [
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
        "minContains",
        "maxContains",
        "minItems",
        "maxItems",
        "uniqueItems",
    ]
)
_OF_OBJECTS = frozenset(
    [
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ]
)
# What says which members there may be that are not listed.
_OF_OTHERS = ("additionalProperties", "propertyNames", "unevaluatedProperties")
# Without one of these, it says nothing about other schemas for the same value.
_COMBINING = frozenset(
    [
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
    ]
)
# All values of a type that has so few.
_CONSTANTS: dict[Type, tuple[Json, ...]] = {"null": (None,), "boolean": (False, True)}
_ANY_NUMBER = NumberRule()
_ANY_INTEGER = NumberRule(kind="integer")
_ANY_STRING = StringRule()
_ANY_ARRAY = ArrayRule()
_ANY_OBJECT = ObjectRule()


class _NotKnownYetError(Exception):
    """A quick look came to a claim that is being worked out."""


def type_of(value: Json) -> Type:
    """The type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, Decimal)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _is_possible(rule: Rule) -> bool:
    """Whether a rule that stands alone does not contradict itself, where that is easily told."""
    if isinstance(rule, (NumberRule, StringRule)):
        return True
    if isinstance(rule, Values) or rule.high is not None:
        return False
    if isinstance(rule, ArrayRule):
        return True
    return not rule.is_wide and all(rule.members.get(n) is not NOTHING for n in rule.required)


def _allows(schema: Schema, kind: Type) -> bool:
    """Whether `type` allows some values of that type."""
    types = schema.types
    return types is None or kind in types or (kind == "number" and "integer" in types)


def _not_number(rule: NumberRule) -> Iterator[NumberRule]:
    bounds = rule.bounds
    if bounds.low is not None:
        yield NumberRule(Bounds(high=bounds.low, is_high_open=not bounds.is_low_open))
    if bounds.high is not None:
        yield NumberRule(Bounds(low=bounds.high, is_low_open=not bounds.is_high_open))
    for multiple in rule.multiples:
        yield NumberRule(excluded_multiples=(multiple,))
    if rule.kind == "integer":
        yield NumberRule(kind="fraction")


def _not_string(rule: StringRule) -> Iterator[StringRule]:
    if rule.min_length:
        yield StringRule(max_length=rule.min_length - 1)
    if rule.max_length is not None:
        yield StringRule(min_length=rule.max_length + 1)
    for pattern in rule.patterns:
        yield StringRule(excluded_patterns=(pattern,))
    for name in rule.formats:
        yield StringRule(excluded_formats=(name,))


def _not_array(rule: ArrayRule) -> Iterator[ArrayRule]:
    if rule.unique:
        raise UnsupportedGrammar(
            "'uniqueItems' that must not hold is not supported",
            feature="uniqueItems",
            pointer=rule.unique,
        )
    if rule.low:
        yield ArrayRule(high=rule.low - 1)
    if rule.high is not None:
        yield ArrayRule(low=rule.high + 1)
    for index, claim in enumerate(rule.prefix):
        if claim is not ANYTHING:
            yield ArrayRule(prefix=(*[ANYTHING] * index, claim.opposite), low=index + 1)
    if rule.rest is not ANYTHING:
        yield ArrayRule(counts=(Count(rule.rest.opposite, 1, None, len(rule.prefix)),))
    for count in rule.counts:
        if count.low:
            yield ArrayRule(counts=(Count(count.claim, 0, count.low - 1, count.start),))
        if count.high is not None:
            yield ArrayRule(counts=(Count(count.claim, count.high + 1, None, count.start),))


def _not_object(rule: ObjectRule) -> Iterator[ObjectRule]:
    """The ways in which the rule may fail, but for members that are missing."""
    for name, claim in rule.members.items():
        if claim is not ANYTHING:
            yield ObjectRule(members={name: claim.opposite}, required=(name,), is_refuting=True)
    for pattern, claim in rule.patterns:
        if claim is not ANYTHING:
            yield ObjectRule(demands=(Demand(claim.opposite, pattern),))
    if rule.others is not ANYTHING:
        yield ObjectRule(demands=(Demand(rule.others.opposite, outside=rule.outside),))
    if rule.names is not ANYTHING:
        yield ObjectRule(demands=(Demand(ANYTHING, name=rule.names.opposite),))
    if rule.low:
        yield ObjectRule(high=rule.low - 1)
    if rule.high is not None:
        yield ObjectRule(low=rule.high + 1)
