"""From rules about objects to one shape: which members there may be, and with which values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from palmette.grammar.distinct import distinct_names
from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar
from palmette.grammar.json_schema.document import spell
from palmette.grammar.json_schema.languages import Languages
from palmette.grammar.json_schema.logic import Conjunction, Logic
from palmette.grammar.json_schema.policy import Policy
from palmette.grammar.json_schema.rules import Demand, ObjectRule, Pattern
from palmette.grammar.json_schema.schemas import ANYTHING, NOTHING, Claim, Key, key_of
from palmette.grammar.json_schema.strings import StringRule
from palmette.grammar.structures import Counter, Member, Members, Names, Part, Punctuation
from palmette.grammar.terms import Kind, Term

_MAX_DEMANDS = 8  # on one member
_MAX_CLASSES = 512


class Objects:
    """Makes the shapes of objects."""

    def __init__(
        self, logic: Logic, languages: Languages, punctuation: Punctuation, policy: Policy
    ) -> None:
        self._logic = logic
        self._languages = languages
        self._punctuation = punctuation
        self._policy = policy
        self._keys: dict[str, bytes] = {}

    def shape(self, rules: Sequence[ObjectRule], pointer: str) -> Members[Key] | None:
        """The objects that all rules allow; None if there are obviously none."""
        logic = self._logic
        demands = list(dict.fromkeys(demand for rule in rules for demand in rule.demands))
        required = dict.fromkeys(name for rule in rules for name in rule.required)
        declared = _names_in(rules)
        members = []
        claims = self._claims(rules, declared)
        logic.store.spend(len(declared) * (4 + len(demands)))
        for name in declared:
            key = key_of(claims[name])
            parts: tuple[Part[Key], ...] = ()
            if key is not None and not demands:
                parts = (Part(key),)
            elif key is not None:
                met = [i for i, demand in enumerate(demands) if logic.is_met_by(demand, name)]
                parts = tuple(kinds_of(key, [(i, demands[i].value) for i in met], pointer))
            if parts:
                members.append(Member(self._spelled(name, pointer), parts, name in required))
            elif name in required:
                return None
        highs = [rule.high for rule in rules if rule.high is not None]
        low = max((rule.low for rule in rules), default=0)
        # A reader keeps the last of two members with one name, so that they count as one.
        is_counted = bool(demands) or low > len(required)
        # What is forbidden by policy cannot be what the schema asks for.
        is_closed = (
            self._policy.undeclared == "forbidden"
            and any(rule.is_listing for rule in rules)
            and not demands
            and low <= len(members)
            and not any(rule.is_open for rule in rules)
        )
        names = self._undeclared(rules, demands, tuple(declared), is_counted, is_closed, pointer)
        shape = Members(
            punctuation=self._punctuation,
            members=tuple(members),
            names=tuple(names),
            counters=(Counter(1),) * len(demands),
            min_members=low,
            max_members=min(highs, default=None),
            order=self._policy.order,
            has_distinct_names=is_counted,
        )
        if not is_counted:
            return shape
        # It looks at the names only, which are terms already.
        counted = distinct_names(cast("Members[Term]", shape), logic.store)
        return cast("Members[Key]", counted)

    def asks_for_undeclared(self, shape: Members[Key], case: Conjunction) -> bool:
        """Whether the object of a case is closed and needs a member that only the failure of
        something else names.
        """
        if self._policy.undeclared == "allowed" or shape.names:
            return False
        rules = [rule for rule in case if isinstance(rule, ObjectRule)]
        named = {name for rule in rules if not rule.is_refuting for name in rule.members}
        named.update(name for rule in rules if not rule.is_refuting for name in rule.required)
        return any(name not in named for rule in rules for name in rule.required)

    def _claims(self, rules: Sequence[ObjectRule], names: Iterable[str]) -> dict[str, list[Claim]]:
        """What the rules say of the values of the members of these names."""
        claims: dict[str, list[Claim]] = {name: [] for name in names}
        for rule in rules:
            self._logic.store.spend(len(claims))
            if rule.is_wide:
                for name, found in claims.items():
                    found += self._logic.claims_on(rule, name)
            else:
                for name, claim in rule.members.items():
                    claims[name].append(claim)
        return claims

    def _spelled(self, name: str, pointer: str) -> bytes:
        known = self._keys.get(name)
        if known is not None:
            return known
        store = self._logic.store
        try:
            text = spell(name)
            text = text if store.can_spell(text) else spell(name, escaped=True)
            self._keys[name] = text
            return text
        except UnicodeEncodeError as error:
            raise InvalidGrammar(
                "a lone surrogate in the name of a property", pointer=pointer
            ) from error

    def _undeclared(
        self,
        rules: Sequence[ObjectRule],
        demands: Sequence[Demand],
        declared: tuple[str, ...],
        canonical: bool,
        is_closed: bool,
        pointer: str,
    ) -> Iterator[Names[Key]]:
        """Classes of names that fall under the same claims; if closed, those of patterns only."""
        if any(rule.others is NOTHING and not rule.patterns for rule in rules):
            return
        if is_closed and not any(rule.patterns for rule in rules):
            return
        forced = key_of(rule.names for rule in rules)
        if forced is None:
            return
        for each in self._classes(rules, demands):
            if is_closed and not any(each.is_named_by(rule) for rule in rules):
                continue
            claims = [claim for rule in rules for claim in each.claims(rule)]
            key = key_of(claims)
            if key is None:
                continue
            met = [(i, d.value) for i, d in enumerate(demands) if each.is_met_by(d)]
            parts = tuple(kinds_of(key, met, pointer))
            if parts:
                term = each.term(self._languages, declared, forced, canonical)
                if term.kind != Kind.EMPTY:
                    yield Names(term, parts)

    def _classes(self, rules: Sequence[ObjectRule], demands: Sequence[Demand]) -> list[_NameClass]:
        patterns: dict[str, Pattern] = {}
        for rule in rules:
            patterns.update((pattern[0], pattern) for pattern, _ in rule.patterns)
        for demand in demands:
            listed = [*demand.outside.patterns, *([demand.pattern] if demand.pattern else [])]
            patterns.update((pattern[0], pattern) for pattern in listed)
        classes = [_NameClass()]
        for pattern in patterns.values():
            classes = [
                part
                for each in classes
                for part in each.divided(pattern)
                if self._languages.term(part.rule).kind != Kind.EMPTY
            ]
            self._check(len(classes))
        names = dict.fromkeys(demand.name for demand in demands if demand.name is not ANYTHING)
        for claim in names:
            classes = [part for each in classes for part in each.divided_by_claim(claim)]
            self._check(len(classes))
        return classes

    def _check(self, num_classes: int) -> None:
        if num_classes > _MAX_CLASSES:
            raise GrammarTooComplex(f"patterns that divide names into more than {_MAX_CLASSES}")


def _names_in(rules: Sequence[ObjectRule]) -> dict[str, None]:
    """The names that the rules speak of, as they come; properties before what is only required."""
    properties = {name for rule in rules for name in rule.members}
    names: dict[str, None] = {}
    for rule in rules:
        names.update(dict.fromkeys(rule.members))
        names.update(dict.fromkeys(name for name in rule.required if name not in properties))
    for rule in rules:
        for demand in rule.demands:
            names.update(dict.fromkeys(sorted(demand.outside.names)))
    return names


_ANY_NAME = StringRule()


class _NameClass(NamedTuple):
    """Names that match some patterns and none of others, and make some claims true."""

    rule: StringRule = _ANY_NAME
    claims_on_name: tuple[Claim, ...] = ()

    def divided(self, pattern: Pattern) -> tuple[_NameClass, _NameClass]:
        inside = self.rule & StringRule(patterns=(pattern,))
        outside = self.rule & StringRule(excluded_patterns=(pattern,))
        return (
            _NameClass(inside, self.claims_on_name),
            _NameClass(outside, self.claims_on_name),
        )

    def divided_by_claim(self, claim: Claim) -> tuple[_NameClass, _NameClass]:
        return (
            _NameClass(self.rule, (*self.claims_on_name, claim)),
            _NameClass(self.rule, (*self.claims_on_name, claim.opposite)),
        )

    def _matches(self, pattern: Pattern) -> bool:
        return any(pattern[0] == each for each, _ in self.rule.patterns)

    def is_named_by(self, rule: ObjectRule) -> bool:
        """Whether such a name matches a pattern of the rule."""
        return any(self._matches(pattern) for pattern, _ in rule.patterns)

    def claims(self, rule: ObjectRule) -> list[Claim]:
        """What the rule says of the values of undeclared members with such names."""
        matched = [claim for pattern, claim in rule.patterns if self._matches(pattern)]
        return matched or [rule.others]

    def is_met_by(self, demand: Demand) -> bool:
        """Whether a member with such a name may be the one demanded."""
        if demand.pattern is not None and not self._matches(demand.pattern):
            return False
        if any(self._matches(pattern) for pattern in demand.outside.patterns):
            return False
        return demand.name is ANYTHING or demand.name in self.claims_on_name

    def term(
        self, languages: Languages, declared: tuple[str, ...], forced: Key, canonical: bool
    ) -> Term:
        """The names as JSON strings, without the declared ones; perhaps none."""
        if self.rule is _ANY_NAME and not forced and not self.claims_on_name:
            return languages.without(declared, canonical=canonical)
        rule = self.rule & StringRule(excluded=declared)
        key = key_of((*forced, *self.claims_on_name))
        if key is None:
            return languages.empty
        return languages.narrowed(rule, key, canonical=canonical)


def kinds_of(key: Key, counted: Sequence[tuple[int, Claim]], pointer: str) -> Iterator[Part[Key]]:
    """The kinds of values at a place, told apart by which of the counted claims they make true."""
    if len(counted) > _MAX_DEMANDS:
        raise GrammarTooComplex(
            f"more than {_MAX_DEMANDS} things to count about one place", pointer=pointer
        )
    if not counted:
        return iter((Part(key),))
    return _divided(key, counted)


def _divided(key: Key, counted: Sequence[tuple[int, Claim]]) -> Iterator[Part[Key]]:
    kinds: list[tuple[Key, tuple[int, ...]]] = [(key, ())]
    for index, claim in counted:
        divided: list[tuple[Key, tuple[int, ...]]] = []
        for known, counters in kinds:
            inside = key_of((*known, claim))
            outside = key_of((*known, claim.opposite))
            if inside is not None:
                divided.append((inside, (*counters, index)))
            if outside is not None:
                divided.append((outside, counters))
        kinds = divided
    for known, counters in kinds:
        yield Part(known, counters)
