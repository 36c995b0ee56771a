"""Terms for JSON strings under length bounds, patterns and formats at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from palmette.grammar.codepoints import ANY
from palmette.grammar.errors import GrammarError, InvalidGrammar
from palmette.grammar.json_schema.formats import PATTERNS
from palmette.grammar.regex import full_match, parse_regex, search
from palmette.grammar.regex.parser import Node
from palmette.grammar.spelling import JsonString
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term


@dataclass(frozen=True, slots=True)
class StringRule:
    """Lengths count code points; patterns match anywhere and come with their JSON pointers."""

    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[tuple[str, str], ...] = ()
    formats: tuple[str, ...] = ()

    def __and__(self, other: StringRule) -> StringRule:
        lengths = [n for n in (self.max_length, other.max_length) if n is not None]
        return StringRule(
            max(self.min_length, other.min_length),
            min(lengths, default=None),
            self.patterns + tuple(p for p in other.patterns if p not in self.patterns),
            self.formats + tuple(f for f in other.formats if f not in self.formats),
        )


class Strings:
    """Makes the terms of string rules, quotes included."""

    def __init__(self, store: TermStore) -> None:
        self.store = store
        self.spelling = JsonString(store)
        self._known: dict[StringRule, Term] = {}
        self._languages: dict[tuple[str, str], Term] = {}

    def term(self, rule: StringRule) -> Term:
        """The JSON strings that the rule allows, perhaps none."""
        term = self._known.get(rule)
        if term is None:
            term = self._known[rule] = self._term(rule)
        return term

    def _term(self, rule: StringRule) -> Term:
        store = self.store
        if rule.max_length is not None and rule.max_length < rule.min_length:
            return store.empty
        terms = [self._pattern(pattern, pointer) for pattern, pointer in rule.patterns]
        terms += [self._format(name) for name in rule.formats]
        if rule.min_length or rule.max_length is not None or not terms:
            any_character = self.spelling.one_of(ANY)
            terms.append(store.repeat(any_character, rule.min_length, rule.max_length))
        content = store.both(*terms)
        return store.empty if store.is_empty(content) else self.spelling.quoted(content)

    def _pattern(self, pattern: str, pointer: str) -> Term:
        try:
            return self._language("pattern", pattern, search)
        except GrammarError as error:
            if error.pointer is not None:
                raise
            message = str(error)
            error.args = (f"{pointer}: {message}",)
            error.pointer = pointer
            raise

    def _format(self, name: str) -> Term:
        return self._language("format", PATTERNS[name], full_match)

    def _language(
        self, kind: str, pattern: str, translate: Callable[[Node, JsonString], Term]
    ) -> Term:
        term = self._languages.get((kind, pattern))
        if term is None:
            node = parse_regex(pattern, self.store.limits)
            term = self._languages[kind, pattern] = translate(node, self.spelling)
        return term


def check_string(value: object, pointer: str) -> str:
    """The value, which must be a string."""
    if not isinstance(value, str):
        raise InvalidGrammar("must be a string", pointer=pointer)
    return value
