"""Terms for JSON strings under length bounds, patterns and formats at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from palmette.grammar.codepoints import ANY
from palmette.grammar.errors import GrammarError, UnsupportedGrammar
from palmette.grammar.json_schema.formats import PATTERNS, WIDER
from palmette.grammar.limits import Limits
from palmette.grammar.recipes import RECIPES
from palmette.grammar.regex import full_match, parse_regex, search
from palmette.grammar.regex.nodes import Node
from palmette.grammar.spelling import Escapes, JsonString
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term

Patterns = tuple[tuple[str, str], ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StringRule:
    """Strings of some lengths that match all of some patterns and formats, and none of others.

    Lengths count code points; patterns match anywhere and come with their JSON pointers; `excluded`
    are whole texts that must not come.
    """

    min_length: int = 0
    max_length: int | None = None
    patterns: Patterns = ()
    formats: tuple[str, ...] = ()
    excluded_patterns: Patterns = ()
    excluded_formats: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether it bounds nothing but the length."""
        return not (
            self.patterns
            or self.formats
            or self.excluded_patterns
            or self.excluded_formats
            or self.excluded
        )

    def __and__(self, other: StringRule) -> StringRule:
        lengths = [n for n in (self.max_length, other.max_length) if n is not None]
        return StringRule(
            max(self.min_length, other.min_length),
            min(lengths, default=None),
            _union(self.patterns, other.patterns),
            _union(self.formats, other.formats),
            _union(self.excluded_patterns, other.excluded_patterns),
            _union(self.excluded_formats, other.excluded_formats),
            _union(self.excluded, other.excluded),
        )


class Strings:
    """Makes the terms of string rules, quotes included.

    A text under no rule but bounds of its length may be spelled with all escapes of JSON. Under
    patterns, formats or excluded texts the `plain` ones of `JsonString` are left: no text is lost,
    and what a pattern spells out is forced.
    """

    def __init__(self, store: TermStore) -> None:
        self.store = store
        self._spellings: dict[Escapes, JsonString] = {}
        self._known: dict[tuple[StringRule, bool], Term] = {}
        self._without: dict[tuple[tuple[str, ...], bool], Term] = {}
        self._free_texts: dict[Escapes, Term] = {}
        self._languages: dict[tuple[Escapes, str, str], Term] = {}

    def term(self, rule: StringRule, *, canonical: bool = False) -> Term:
        """The JSON strings that the rule allows, perhaps none.

        `canonical`: each text in one spelling only, with the fewest escapes.
        """
        key = (rule, canonical)
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = self._made(rule, canonical)
        return term

    def _made(self, rule: StringRule, canonical: bool) -> Term:
        escapes: Escapes = "any" if rule.is_free else "plain"
        if canonical:
            escapes = "canonical"
        if rule.patterns or rule.excluded_patterns or rule.excluded:
            return self._term(rule, self._spelling(escapes))

        def make(kitchen: TermStore) -> Term:
            strings = Strings(kitchen)
            return strings._term(rule, strings._spelling(escapes))

        return RECIPES.term(self.store, ("string", rule, escapes), make)

    def without(self, texts: tuple[str, ...], *, canonical: bool = False) -> Term:
        """What `term` makes of a rule that excludes these texts and says no more."""
        if not texts:
            return self.term(StringRule(), canonical=canonical)
        key = (texts, canonical)
        term = self._without.get(key)
        if term is None:
            spelling = self._spelling("canonical" if canonical else "plain")
            content = self.store.both(
                self._free(spelling), self.store.complement(spelling.texts(texts))
            )
            # Not empty, since there are more strings than texts, unless nothing can be spelled.
            term = self._without[key] = spelling.quoted(content)
        return term

    def _free(self, spelling: JsonString) -> Term:
        """Any characters."""
        term = self._free_texts.get(spelling.escapes)
        if term is None:
            term = self.store.repeat(spelling.one_of(ANY), 0, None)
            self._free_texts[spelling.escapes] = term
        return term

    def holds(self, rule: StringRule, text: str) -> bool:
        """Whether the text is one of the rule's. One with a lone surrogate never is."""
        self.store.spend(1 + len(rule.excluded) // 32 + len(text) // 32)
        if len(text) < rule.min_length or text in rule.excluded:
            return False
        if rule.max_length is not None and len(text) > rule.max_length:
            return False
        if any("\ud800" <= character <= "\udfff" for character in text):
            return False
        return (
            all(self.matches(pattern, pointer, text) for pattern, pointer in rule.patterns)
            and all(self._accepts(self._format(name, self._plain), text) for name in rule.formats)
            and not any(self.matches(*each, text) for each in rule.excluded_patterns)
            and not any(
                self._accepts(self._wider_format(name, self._plain), text)
                for name in rule.excluded_formats
            )
        )

    def matches(self, pattern: str, pointer: str, text: str) -> bool:
        """Whether the pattern, which stands at `pointer`, matches somewhere in the text."""
        return self._accepts(self._pattern(pattern, pointer, self._plain), text)

    def listed(self, texts: Iterable[str]) -> Term:
        """The JSON strings that stand for one of the texts.

        One with a lone surrogate cannot be spelled and is left out.
        """
        return self._plain.quoted(self._plain.texts(texts))

    @property
    def _plain(self) -> JsonString:
        return self._spelling("plain")

    def _accepts(self, term: Term, text: str) -> bool:
        return self.store.accepts(term, self._plain.plainest(text))

    def _spelling(self, escapes: Escapes) -> JsonString:
        spelling = self._spellings.get(escapes)
        if spelling is None:
            spelling = self._spellings[escapes] = JsonString(self.store, escapes=escapes)
        return spelling

    def _term(self, rule: StringRule, spelling: JsonString) -> Term:
        store = self.store
        if rule.max_length is not None and rule.max_length < rule.min_length:
            return store.empty
        terms = [self._pattern(*each, spelling) for each in rule.patterns]
        terms += [self._format(name, spelling) for name in rule.formats]
        if rule.min_length or rule.max_length is not None or not terms:
            any_character = spelling.one_of(ANY)
            terms.append(store.repeat(any_character, rule.min_length, rule.max_length))
        excluded = [self._pattern(*each, spelling) for each in rule.excluded_patterns]
        excluded += [self._wider_format(name, spelling) for name in rule.excluded_formats]
        if rule.excluded:
            excluded.append(spelling.texts(rule.excluded))
        content = store.both(*terms, *(store.complement(each) for each in excluded))
        return store.empty if store.is_empty(content) else spelling.quoted(content)

    def _pattern(self, pattern: str, pointer: str, spelling: JsonString) -> Term:
        try:
            return self._language("pattern", pattern, search, spelling)
        except GrammarError as error:
            if error.pointer is not None:
                raise
            error.say(str(error), pointer)
            raise

    def _format(self, name: str, spelling: JsonString) -> Term:
        return self._language("format", PATTERNS[name], full_match, spelling)

    def _wider_format(self, name: str, spelling: JsonString) -> Term:
        """All that may be of the format; what is not of it is outside."""
        wider = WIDER.get(name, PATTERNS[name])
        if wider is None:
            raise UnsupportedGrammar(
                f"a string that is not of the format {name!r} is not supported", feature="format"
            )
        return self._language("format", wider, full_match, spelling)

    def _language(
        self,
        kind: str,
        pattern: str,
        translate: Callable[[Node, JsonString], Term],
        spelling: JsonString,
    ) -> Term:
        key = (spelling.escapes, kind, pattern)
        term = self._languages.get(key)
        if term is None:
            is_format = kind == "format"
            node = _format(pattern) if is_format else parse_regex(pattern, self.store.limits)
            term = self._languages[key] = translate(node, spelling)
        return term


@lru_cache(maxsize=64)
def _format(pattern: str) -> Node:
    """One of the patterns of `formats`, read once."""
    return parse_regex(pattern, Limits())


def _union(one: tuple[_T, ...], other: tuple[_T, ...]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(one + other))
