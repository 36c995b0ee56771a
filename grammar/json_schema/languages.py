"""Terms for the strings, and so for the names of members, that claims allow."""

from __future__ import annotations

from palmette.grammar.json_schema.document import spell
from palmette.grammar.json_schema.logic import Conjunction, Logic
from palmette.grammar.json_schema.rules import merged
from palmette.grammar.json_schema.schemas import Key
from palmette.grammar.json_schema.strings import StringRule
from palmette.grammar.terms import Term


class Languages:
    """JSON strings, in every spelling or in one only, by rule and by key."""

    def __init__(self, logic: Logic) -> None:
        self._logic = logic
        self._strings = logic.strings
        self._store = logic.store
        self.empty = self._store.empty

    def term(self, rule: StringRule, *, canonical: bool = False) -> Term:
        """The strings of a rule."""
        return self._strings.term(rule, canonical=canonical)

    def without(self, texts: tuple[str, ...], *, canonical: bool = False) -> Term:
        """All strings but these."""
        return self._strings.without(texts, canonical=canonical)

    def narrowed(self, rule: StringRule, key: Key, *, canonical: bool = False) -> Term:
        """The strings of the rule that make every claim of the key true."""
        if not key:
            return self.term(rule, canonical=canonical)
        cases = self._logic.conjunctions(key, "string")
        terms = [self._case(rule, case, canonical) for case in cases]
        return self._store.lexeme(self._store.alternation(terms))

    def _case(self, rule: StringRule, case: Conjunction, canonical: bool) -> Term:
        rules = (rule, *case)
        listed = self._logic.listed(rules, "string")
        if listed is None:
            return self.term(merged(StringRule, rules), canonical=canonical)
        texts = list(listed)
        if not texts:
            return self.empty
        if canonical:
            return self._store.words(map(spell, texts))
        return self._strings.listed(texts)
