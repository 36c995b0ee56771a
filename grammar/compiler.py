"""Turns regexes, schemas and choices into compiled grammars, and remembers them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.errors import GrammarTooComplex, InvalidGrammar, UnsatisfiableGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.mask import SharedMasks
from palmette.grammar.regex import full_match, parse_regex
from palmette.grammar.spelling import Utf8
from palmette.grammar.terms import TermStore, WordList
from palmette.grammar.vocabulary import Vocabulary

Whitespace = Literal["compact", "flexible"]


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Thread-safe; equal sources share one result."""

    def __init__(self, vocabulary: Vocabulary, *, limits: Limits | None = None) -> None:
        self.vocabulary = vocabulary
        self.limits = limits or Limits()
        self._shared = SharedMasks(self.limits.shared_cache_bytes)
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile_regex(self, pattern: str) -> CompiledGrammar:
        """The whole text matches `pattern`. See `palmette.grammar.regex.parser` for the syntax."""
        self._check_size(pattern)
        return self._remember("regex", pattern, lambda: self._regex(pattern))

    def compile_choices(self, options: Iterable[str]) -> CompiledGrammar:
        """The text is one of `options`, taken literally."""
        listed = list(options)
        for option in listed:
            if not isinstance(option, str):
                raise InvalidGrammar(f"choices must be strings, got {type(option).__name__}")
        if not listed:
            raise InvalidGrammar("choices must not be empty")
        source = json.dumps(listed)
        self._check_size(source)
        return self._remember("choices", source, lambda: self._choices(listed))

    def _regex(self, pattern: str) -> CompiledGrammar:
        store = self._store()
        node = parse_regex(pattern, max_nesting=self.limits.max_nesting)
        term = full_match(node, Utf8(store))
        if store.is_empty(term):
            raise UnsatisfiableGrammar("no text matches the pattern")
        return CompiledGrammar(
            self.vocabulary, store, store.lexeme(term), self._shared, self.limits
        )

    def _choices(self, options: list[str]) -> CompiledGrammar:
        store = self._store()
        try:
            words = WordList(option.encode() for option in options)
        except UnicodeEncodeError as error:
            raise InvalidGrammar(f"a choice is not valid Unicode: {error.reason}") from error
        return CompiledGrammar(
            self.vocabulary, store, store.words(words), self._shared, self.limits
        )

    def _store(self) -> TermStore:
        store = TermStore(self.limits)
        store.start_clock(self.limits.compile_seconds)
        return store

    def _check_size(self, source: str) -> None:
        if len(source) > self.limits.max_source:
            raise GrammarTooComplex(
                f"the grammar has {len(source)} characters, the limit is {self.limits.max_source}"
            )

    def _remember(
        self, kind: str, source: str, compile_it: Callable[[], CompiledGrammar]
    ) -> CompiledGrammar:
        key = (kind, source)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        compiled = compile_it()
        with self._lock:
            compiled = self._compiled.setdefault(key, compiled)
            while len(self._compiled) > self.limits.max_grammars:
                self._compiled.popitem(last=False)
        return compiled
